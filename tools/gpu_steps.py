#!/usr/bin/env python3
"""Steps for a rented GPU, in two calls of five and a half minutes each, after `make gpu-kit`
on any machine:

    python tools/gpu_steps.py 1 --out FOLDER
    python tools/gpu_steps.py 2 --out FOLDER
    python tools/gpu_steps.py variants ncu --out FOLDER    some steps, by name

1: each kind of call, the tests of the device, the kernels' errors and times, and what they wait
for. 2: the benchmarks of evaluation and training, whose gpu.json goes to benchmarks/results/, then
Inkling's attention and a Conformer's layer. FOLDER gets callN.txt, a line for each step as it ends;
callN.log, all that was printed; and figuresN.jsonl, a line for each figure as soon as it exists.

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
TESTS = (  # beside the CUDA C++ kernels', what has not run on a GPU yet
    "tests/txl_kernels/cuda",
    "tests/txl_kernels/triton/test_device.py::test_inklings_terms",
    "tests/txl_kernels/triton/test_triton.py::test_what_no_query_sees_may_hold_anything_that_descriptors_load",
    "tests/txl_kernels/api/test_values.py::test_what_no_query_sees_may_hold_anything",
)
MODELS = ("tests/txl/evaluation/test_engine_device.py", "tests/txl/training/test_training_device.py")
TINY_TESTS = ("tests/txl_kernels/api/test_values.py::test_what_no_query_sees_may_hold_anything", "-k", "window")
BENCHMARKS = ("benchmarks/groups/test_evaluation.py", "benchmarks/groups/test_training.py")


class Step(NamedTuple):
    """A command with its limit in seconds."""

    name: str
    call: int
    seconds: int
    command: Sequence[str]


class Where(NamedTuple):
    """The folder of the results, and the files of one call."""

    folder: Path
    label: str
    rehearse: bool

    @property
    def lines(self) -> Path:
        return self.folder / f"call{self.label}.txt"

    @property
    def log(self) -> Path:
        return self.folder / f"call{self.label}.log"

    @property
    def figures(self) -> Path:
        return self.folder / f"figures{self.label}.jsonl"


def steps(where: Where) -> list[Step]:
    """Return all steps, in order."""
    python = [sys.executable]
    pytest = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_plugin"]
    cores = os.cpu_count() or 1
    workers = 1 if where.rehearse else 12 if cores > 14 else max(cores - 2, 2)
    many = [*pytest, "--timeout", "75", "--timeout-method", "thread", "--max-worker-restart", "1000", f"-n{workers}"]
    many += ["--backends", "triton", "-m", "triton" if where.rehearse else "gpu"]
    timed = [*pytest, "--benchmark-only", "--record", str(where.folder / "gpu.json")]
    timed += (f"--device {'interpreter --deadline 1' if where.rehearse else 'cuda --deadline 160'}").split()
    widths = "16" if where.rehearse else "64,128"

    def figures(name: str, call: int, seconds: int) -> Step:
        command = [*python, "tools/gpu_figures.py", name, "--out", str(where.figures)]
        if where.rehearse:
            seconds *= 5
            command += ["--rehearse", "--variants", str(where.folder / "variants")]
        return Step(name, call, seconds, [*command, "--seconds", str(max(seconds - 8, 1))])

    return [
        Step("card", 1, 10, ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv"]),
        Step("module", 1, 20, [*python, "tools/gpu_card.py", "built", "0"]),
        Step("check", 1, 45, [*python, "tools/gpu_kernels.py", "check", "--widths", widths]),
        Step("tests", 1, 100, [*many, *(TINY_TESTS if where.rehearse else TESTS)]),
        figures("variants", 1, 110),
        figures("queries", 1, 40),
        figures("ncu", 1, 45),
        Step("models", 2, 80, [*many, *(TINY_TESTS if where.rehearse else MODELS)]),
        Step("benchmarks", 2, 200, [*timed, *BENCHMARKS]),
        figures("inkling", 2, 40),
        figures("conformer", 2, 60),
        figures("flex", 2, 60),
    ]


def environment(where: Where) -> dict[str, str]:
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
    return found | ({"TRITON_INTERPRET": "1"} if where.rehearse else {})


def install() -> str:
    """Put the carried modules beside their Python; return what was done."""
    files = [x for folder in ("variants/today", "native") for x in sorted((KIT / folder).rglob("_*.so"))]
    for file in files:
        shutil.copy(file, ROOT / "txl_kernels" / file.name)
    return f"modules: {', '.join(x.name for x in files) or 'none is carried'}"


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
    for sign in (signal.SIGTERM, signal.SIGKILL):  # what it started may outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
    return f"{ending}, {time.monotonic() - begun:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; return 0 if all ended with status 0, else 1."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="1, 2, or names of steps")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-check")), help="folder of the results"
    )
    parser.add_argument("--seconds", type=float, default=330, help="of the whole call, after which nothing is started")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU")
    given = parser.parse_args(arguments)
    label = given.what[0] if given.what[0] in ("1", "2") else ""
    where = Where(given.out.resolve(), label, given.rehearse)
    where.folder.mkdir(parents=True, exist_ok=True)
    known = steps(where)
    unknown = set(given.what) - {"1", "2", *(x.name for x in known)}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are 1, 2, {', '.join(x.name for x in known)}")
    env, bad = environment(where), False
    with where.lines.open("w") as lines, where.log.open("wb") as log:

        def tell(line: str) -> None:
            for file in (lines, sys.stdout):
                print(line, file=file, flush=True)

        if not where.rehearse:
            tell(install())
        for step in known:
            if not {str(step.call), step.name} & set(given.what):
                continue
            left = given.seconds - (time.monotonic() - begun)
            if left < 5:
                tell(f"{step.name}: not run, the time is up")
                bad = True
                continue
            log.write(f"\n=== {step.name}\n".encode())
            log.flush()
            ending = run(step, min(step.seconds, left), log, env)
            tell(f"{step.name}: {ending}: {last_line(where.log)}")
            bad |= not ending.startswith("exit 0")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
