#!/usr/bin/env python3
"""Steps for a rented GPU, after `make gpu-kit` on any machine: three calls of at most 240 seconds,
600 together, what decides most first.

    python tools/gpu_steps.py 1 --out FOLDER     builds in turns, their tests, Nsight Compute
    python tools/gpu_steps.py 2 --out FOLDER     models: tests, evaluation, training
    python tools/gpu_steps.py 3 --out FOLDER     decode, a Conformer's layer, compute-sanitizer
    python tools/gpu_steps.py variants ncu       some steps, by name

Everything is printed as it comes, and is in FOLDER/NAME.log, with a record of each benchmark, which
may go to benchmarks/results/. A step that fails or is at its limit leaves its reason, and the
others still run. Needs torch with CUDA, triton and pytest, and no network. --rehearse: tiny shapes
on a CPU.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "gpu-kit"
GROUPS, CUDA_TESTS = "benchmarks/groups", "tests/txl_kernels/cuda"
CALLS = {"1": 240, "2": 200, "3": 160}  # seconds
MODELS = ("tests/txl/evaluation/test_engine_device.py", "tests/txl/training/test_training_device.py")
LOGGED = ("bash", "-o", "pipefail", "-c", '"${@:2}" 2>&1 | tee "$1"', "logged")  # log, command


class Step(NamedTuple):
    """A command with its limit in seconds. build: of the CUDA C++ kernels in gpu-kit/tested, which
    ends long waits (TXL_CLOCK_LIMIT)."""

    name: str
    call: str
    seconds: int
    command: Sequence[str]
    build: str = ""


def steps(out: Path, rehearse: bool) -> list[Step]:
    """Return all steps, in order."""
    python, workers = sys.executable, 1 if rehearse else max((os.cpu_count() or 1) - 2, 2)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_plugin"]
    limited = ["-m", "gpu", "--timeout", "15", "--timeout-method", "thread", "--max-worker-restart", "1000"]
    tests = [*pytest, f"-n{workers}", *limited, "--backends", "triton"]
    variants = [python, "tools/gpu_variants.py", str(KIT / "builds"), "--seconds", "65"]
    ncu = ["ncu", "--clock-control", "none", "--section", "SourceCounters", "--section", "WarpStateStats", "-f", "-o"]
    ncu += [str(out / "ncu.ncu-rep"), "--kernel-name", "regex:forward_kernel|backward_queries_kernel"]
    ncu += [python, str(Path(__file__).resolve()), "launches"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", *pytest, "-m", "gpu", "-k", "intervals"]

    def benchmark(name: str, call: str, seconds: int, *selected: str) -> Step:
        device = [
            "--device",
            "interpreter" if rehearse else "cuda",
            "--deadline",
            str(9999 if rehearse else seconds - 10),
        ]
        command = [*pytest, "--benchmark-only", *device, "--record", str(out / f"{name}.json"), *selected]
        return Step(name, call, seconds, command)

    return [
        Step("variants", "1", 80, [*variants, *(["--rehearse"] if rehearse else [])]),
        Step("tests", "1", 60, [*tests, CUDA_TESTS], "default"),
        Step("tests of two warpgroups", "1", 35, [*tests, f"{CUDA_TESTS}/test_hopper.py"], "TXL_TWO_WARPGROUPS"),
        Step("ncu", "1", 45, ncu),
        Step("ncu by instruction", "1", 20, ["ncu", "--import", str(out / "ncu.ncu-rep"), "--page", "source", "--csv"]),
        Step("model tests", "2", 50, [*tests, *MODELS], "default"),
        benchmark("evaluation", "2", 150, f"{GROUPS}/test_evaluation.py", f"{GROUPS}/test_training.py"),
        benchmark("decode", "3", 60, f"{GROUPS}/test_attention.py", f"{GROUPS}/test_inkling.py", "-k", "decode"),
        benchmark("layers", "3", 50, f"{GROUPS}/test_integrations.py"),
        Step("sanitizer", "3", 50, [*sanitizer, f"{CUDA_TESTS}/test_hopper.py"], "default"),
    ]


def environment(step: Step, rehearse: bool) -> dict[str, str]:
    """Return the environment of a step."""
    folders = [ROOT, ROOT / "tools", ROOT / "tests/support", ROOT / "benchmarks", KIT / "site"]
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),  # ncu
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms ask for it
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",  # several processes share the cores
        "TXL_KERNELS_SELF_CHECK": "off",  # the steps compare by themselves
    }
    if (KIT / "commit").is_file():
        found["BENCHMARK_COMMIT"] = (KIT / "commit").read_text().strip()
    build = {"GPU_BUILD": str(KIT / "tested" / step.build)} if step.build and not rehearse else {}
    return found | build | ({"TRITON_INTERPRET": "1"} if rehearse else {})


def launches() -> None:
    """Launch the kernels that Nsight Compute watches."""
    import gpu_variants

    for length, width in ((512, 128), (2048, 128), (512, 64)):
        x = gpu_variants.tensors((8, 16, length, length, width, False), "cuda")
        gpu_variants.ours(x).sum().backward()


def run(step: Step, seconds: float, log: Path, env: dict[str, str]) -> str:
    """Run a step, and end it with all its processes at its limit; return how it ended."""
    begun = time.monotonic()
    process = subprocess.Popen([*LOGGED, str(log), *step.command], cwd=ROOT, env=env, start_new_session=True)
    try:
        ending = f"exit {process.wait(timeout=seconds)}"
    except subprocess.TimeoutExpired:
        ending = "at its limit"
    for sign in (signal.SIGTERM, signal.SIGKILL):  # its own processes may outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
    return f"{ending}, {time.monotonic() - begun:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 0 if all ended with status 0, else 1."""
    begun, bad = time.monotonic(), False
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="1, 2, 3, or names of steps")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-check")))
    parser.add_argument("--seconds", type=float, help="of the whole call (default: 240, 200 or 160)")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    known = steps(out, given.rehearse)
    if given.what == ["launches"]:
        launches()
        return 0
    if unknown := set(given.what) - {*CALLS, *(x.name for x in known)}:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*CALLS, *(x.name for x in known)])}"
        )
    out.mkdir(parents=True, exist_ok=True)
    limit = given.seconds or sum(CALLS.get(x, 0) for x in given.what) or 240
    for file in () if given.rehearse else (KIT / "builds/default").glob("*.so"):
        shutil.copy(file, ROOT / "txl_kernels")
    for step in known:
        if not {step.call, step.name} & set(given.what):
            continue
        left, ending = limit - (time.monotonic() - begun), "not run, the time is up"
        if left > 5:
            seconds = min(step.seconds * (9 if given.rehearse else 1), left)
            ending = run(step, seconds, out / f"{step.name}.log", environment(step, given.rehearse))
        print(f"=== {step.name}: {ending}", flush=True)
        bad |= not ending.startswith("exit 0")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
