#!/usr/bin/env python3
"""Steps for a rented GPU, in calls of five and a half minutes each, after `make gpu-kit` on any
machine:

    python tools/gpu_steps.py 1 --out FOLDER
    python tools/gpu_steps.py 2 --out FOLDER
    python tools/gpu_steps.py 3 --out FOLDER
    python tools/gpu_steps.py decode ncu --out FOLDER    some steps, by name

1: each kind of call, the tests of the device, and variants of the CUDA C++ kernels (module and
library, in gpu-kit/variants/NAME) against the default; the tests of the one that has all, too. 2:
the models' tests, and benchmarks of evaluation, training and Inkling's attention. 3: decode, Nsight
Compute, compute-sanitizer and a Conformer's layer. FOLDER gets callN.txt, a line for each step as
it ends; callN.log, all that was printed; ncu.csv; and a record for each benchmark, which may go to
benchmarks/results/.

Each step is a process with a limit of time: one that fails or hangs leaves its reason, and the
others still run. Needs torch with CUDA, triton and pytest, and no network. Without gpu-kit/
Triton's kernels are compiled there, and `pip install .` compiles the others. --rehearse tries it on
a CPU, with tiny shapes.
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
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "gpu-kit"
SITES = ROOT / "build/gpu-sites"  # the packages with a variant's module
GROUPS = "benchmarks/groups"
CALLS = ("1", "2", "3")
ALL_VARIANTS = "TXL_SECOND_GENERATION"  # the macro that stands for all others
TESTS = ("tests/txl_kernels/cuda", "tests/txl_kernels/triton/test_device.py::test_inklings_terms")
MODELS = ("tests/txl/evaluation/test_engine_device.py", "tests/txl/training/test_training_device.py")
TINY_TESTS = ("tests/txl_kernels/api/test_values.py", "-k", "window")
KERNELS = "regex:forward_kernel|backward_queries_kernel"  # which Nsight Compute watches
METRICS = (
    "regex:smsp__average_warps_issue_stalled_.*_per_issue_active", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "regex:sm__inst_executed_pipe_tensor.*sum$", "smsp__inst_executed.sum", "sm__cycles_elapsed.max",
    "smsp__issue_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread", "gpu__time_duration.sum",
)  # fmt: skip


class Step(NamedTuple):
    """A command with its limit in seconds."""

    name: str
    call: int
    seconds: int
    command: Sequence[str]


def steps(out: Path, rehearse: bool) -> list[Step]:
    """Return all steps, in order."""
    python = [sys.executable]
    pytest = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_plugin"]
    cores = os.cpu_count() or 1
    workers = 1 if rehearse else 12 if cores > 14 else max(cores - 2, 2)
    tests = [*pytest, "--timeout", "75", "--timeout-method", "thread", "--max-worker-restart", "1000", f"-n{workers}"]
    tests += ["--backends", "triton", "-m", "triton" if rehearse else "gpu"]
    launches = [*python, str(Path(__file__).resolve()), "launches"]
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    ncu += ["--kernel-name", KERNELS, "--metrics", ",".join(METRICS), "--log-file", str(out / "ncu.csv")]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", *pytest, "-m", "gpu"]

    def benchmark(name: str, call: int, seconds: int, *selected: str) -> Step:
        device = "interpreter" if rehearse else "cuda"
        selected = (f"{GROUPS}/test_attention.py", "-k", "decode") if rehearse else selected
        options = ["--device", device, "--deadline", str(seconds - 15)]
        command = [*pytest, "--benchmark-only", *options, "--record", str(out / f"{name}.json"), *selected]
        return Step(name, call, seconds * (5 if rehearse else 1), command)

    def variant(name: str) -> list[Step]:
        """The times of a variant of the CUDA C++ kernels against the default, and the tests of the
        one that has all."""
        site, unsafe = str(SITES / name), ["env", "PYTHONSAFEPATH=1"]
        path = f"PYTHONPATH={os.pathsep.join([site, environment()['PYTHONPATH']])}"
        timed = ["-k", "cuda and (test_slow_to_start or test_length and L2048)", f"--base={site}"]
        tested = Step(f"tests of {name}", 1, 40, [*unsafe, path, *tests, "tests/txl_kernels/cuda/test_hopper.py"])
        times = benchmark(f"default against {name}", 1, 35, f"{GROUPS}/test_attention.py", *timed)
        return [tested, times] if name == ALL_VARIANTS else [times]

    return [
        Step("card", 1, 10, ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv"]),
        Step("check", 1, 45, [*python, "tools/gpu_kernels.py", "check", "--widths", "16" if rehearse else "64,128"]),
        Step("tests", 1, 70, [*tests, *(TINY_TESTS if rehearse else TESTS)]),
        *(step for name in variants() for step in variant(name)),
        benchmark("decode", 3, 75, f"{GROUPS}/test_attention.py", f"{GROUPS}/test_inkling.py", "-k", "decode"),
        Step("ncu", 3, 40, [*ncu, *launches]),
        Step("sanitizer", 3, 60, [*sanitizer, "tests/txl_kernels/cuda/test_hopper.py", "-k", "intervals or dropout"]),
        Step("model tests", 2, 60, [*tests, *(TINY_TESTS if rehearse else MODELS)]),
        benchmark("evaluation", 2, 150, f"{GROUPS}/test_evaluation.py", f"{GROUPS}/test_training.py"),
        benchmark("inkling", 2, 100, f"{GROUPS}/test_inkling.py", "-k", "not decode"),
        benchmark("layers", 3, 60, f"{GROUPS}/test_integrations.py"),
    ]


def variants() -> list[str]:
    return sorted({x.parent.name for x in (KIT / "variants").glob("*/_cuda*.so")})


def environment(rehearse: bool = False) -> dict[str, str]:
    """Return the environment of the steps."""
    folders = [ROOT, ROOT / "tools", ROOT / "tests/support", ROOT / "benchmarks", KIT / "site"]
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),  # nvcc, ncu
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms ask for it
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "2",  # several processes share the cores
        "TXL_KERNELS_SELF_CHECK": "off",  # the steps compare by themselves
        # Part of a kernel's name where they are set: as when the carried kernels were compiled.
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
    }
    if (KIT / "triton").is_dir():
        found["TRITON_CACHE_DIR"] = str(KIT / "triton")
    if (KIT / "commit").is_file():
        found["BENCHMARK_COMMIT"] = (KIT / "commit").read_text().strip()
    return found | ({"TRITON_INTERPRET": "1"} if rehearse else {})


def install() -> str:
    """Put the carried modules beside their Python, and make the packages of each variant; return a
    message."""
    files = sorted((KIT / "native").glob("*.so"))
    for file in files:
        shutil.copy(file, ROOT / "txl_kernels")
    for name in variants():
        for package in ("txl", "txl_kernels"):
            shutil.copytree(ROOT / package, SITES / name / package, dirs_exist_ok=True)
        for file in (KIT / "variants" / name).glob("*.so"):
            shutil.copy(file, SITES / name / "txl_kernels")
    return (
        f"modules: {', '.join(x.name for x in files) or 'none is carried'}; variants: {', '.join(variants()) or 'none'}"
    )


def launches() -> None:
    """Launch the CUDA C++ kernels twice, forward at width 64 and both ways at width 128; only the
    second time lies in the profiler's range."""
    import torch

    from harness.case import Shape
    from harness.machine import Machine
    from implementations.attention import entry, rel_attention_on

    ours, machine = rel_attention_on("cuda"), Machine("cuda")
    runs = [entry(ours, machine, Shape(8, 16, 512, 512, width), width == 128).run for width in (64, 128)]
    for n in range(2):
        if n:
            torch.cuda.profiler.start()
        for run in runs:
            run()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:150] if lines else ""


def run(step: Step, seconds: float, log: IO[bytes], env: dict[str, str]) -> str:
    """Run a step, and end it with all its processes at its limit; return how it ended."""
    begun = time.monotonic()
    try:
        process = subprocess.Popen(step.command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    except OSError as error:
        return f"not started, {error}"
    try:
        process.wait(timeout=seconds)
        ending = f"exit {process.returncode}"
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
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="1, 2, 3, or names of steps")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-check")), help="folder of the results"
    )
    parser.add_argument("--seconds", type=float, default=330, help="of the whole call, after which nothing is started")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    given = parser.parse_args(arguments)
    if given.what == ["launches"]:
        launches()
        return 0
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    label = given.what[0] if given.what[0] in CALLS else ""
    known = steps(out, given.rehearse)
    unknown = set(given.what) - {*CALLS, *(x.name for x in known)}
    if unknown:
        parser.error(
            f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*CALLS, *(x.name for x in known)])}"
        )
    env, bad, log_file = environment(given.rehearse), False, out / f"call{label}.log"
    with (out / f"call{label}.txt").open("w") as lines, log_file.open("wb") as log:

        def report(line: str) -> None:
            for file in (lines, sys.stdout):
                print(line, file=file, flush=True)

        if not given.rehearse:
            report(install())
        for step in known:
            if not {str(step.call), step.name} & set(given.what):
                continue
            left = given.seconds - (time.monotonic() - begun)
            if left < 5:
                report(f"{step.name}: not run, the time is up")
                bad = True
                continue
            log.write(f"\n=== {step.name}\n".encode())
            log.flush()
            ending = run(step, min(step.seconds, left), log, env)
            report(f"{step.name}: {ending}: {last_line(log_file)}")
            bad |= not ending.startswith("exit 0")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
