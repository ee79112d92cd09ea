"""The machine under test: device, dtype, backends, clocks and caches, and its description in
records."""

import contextlib
import ctypes
import datetime
import functools
import gc
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

import txl_kernels
from harness import internals
from txl_kernels import available_backends

T = TypeVar("T")
Run = Callable[[], object]
_BEYOND_CACHES = 2**28  # bytes; more than the last-level cache shared by 2 to 64 cores of current processors


class Machine:
    """The machine that runs the benchmarks: the CPU, the GPU, or "interpreter", which runs tiny
    problems in Triton's interpreter and whose times have no meaning.

    brief: one cold round of each implementation, of smaller problems where one takes long.
    """

    def __init__(self, kind: str, brief: bool = False) -> None:
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("--device interpreter needs TRITON_INTERPRET=1 in the environment")
        self.kind, self.brief = kind, brief
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self.dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        names = ["triton"] if kind == "interpreter" else available_backends(self.device, self.dtype)
        self.decode_backends = [name for name in names if name != "reference"]
        few = self.decode_backends
        self.backends = [name for name in few if internals.takes_many_queries(name, self.device, self.dtype)]

    def pick(self, *, cpu: T, cuda: T, interpreter: T) -> T:
        """Return the argument for this kind of machine."""
        return {"cpu": cpu, "cuda": cuda, "interpreter": interpreter}[self.kind]

    def clock(self, name: str, run: Callable[[], Any]) -> Callable[[], float]:
        """Return a function that runs once and returns seconds; name: a `Comparison`'s clock."""
        if name == "own":
            return run
        timer = getattr(self, "on_device" if name == "device" else name)
        return lambda: timer(run)

    def wall(self, run: Run) -> float:
        """Return the seconds until the result is available, launches included."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def on_device(self, run: Run) -> float:
        """Return the seconds between events around each of many launches, with the L2 cache flushed
        before each. Idle time of the device is included."""
        if self.kind != "cuda":
            return self.wall(run)
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=40, return_mode="median")) / 1e3

    def cold(self, run: Run) -> float:
        """Return the time as `on_device` does, with other data in the caches before each launch, as
        if other layers of a model had run."""
        if self.kind == "cpu":
            _elsewhere().sum()
        return self.on_device(run)

    def allocated(self, run: Run) -> dict[str, float]:
        """Return the peak memory in MiB that a run allocates on a GPU beyond what exists before, or
        on a CPU {}."""
        if self.kind != "cuda":
            return {}
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.synchronize()
        return {"allocated_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """Release the memory of a finished comparison to the system, where glibc would keep freed
        blocks, or to other processes on the GPU."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def name(self) -> str:
        if self.kind == "interpreter":
            return "interpreter"
        return torch.cuda.get_device_name() if self.kind == "cuda" else _cpu_name()

    def about(self) -> dict[str, Any]:
        """Return the record's description of this machine and its software."""
        commit, dirty = _commit()
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "kind": self.kind, "device": self.name, "cpu": _cpu_name(), **_cpu_model(), "cores": os.cpu_count(),
            "threads": self.threads, "isa": internals.instruction_set(),
            "dtype": str(self.dtype).removeprefix("torch."), "backends": self.decode_backends,
            "python": platform.python_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda if self.kind == "cuda" else None, "triton": _version("triton"),
            "transformers": _version("transformers"), "txl_kernels": txl_kernels.__version__,
            "commit": commit, "uncommitted_changes": dirty, "command": " ".join(["pytest", *sys.argv[1:]]),
        }  # fmt: skip

    def slug(self) -> str:
        """Return the machine's name as a part of file names."""
        name = self.name if self.kind == "cuda" else f"{self.name}-{self.threads}t"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@functools.cache
def _elsewhere() -> torch.Tensor:
    return torch.ones(_BEYOND_CACHES // 4)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; {} where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in fields}


def _cpu_name() -> str:
    return _cpuinfo().get("model name", platform.machine())


def _cpu_model() -> dict[str, int]:
    """Return the processor's family, model and stepping, which its name may leave out; {} on
    processors that have none."""
    found = {"family": "cpu family", "model": "model", "stepping": "stepping"}
    return {key: int(_cpuinfo()[name]) for key, name in found.items() if _cpuinfo().get(name, "").isdigit()}


def _commit() -> tuple[str, bool]:
    """Return the commit of the benchmarks' folder, and whether tracked files differ from it.
    BENCHMARK_COMMIT, in the form of git describe --dirty, replaces it for a tree without
    history."""
    given = os.environ.get("BENCHMARK_COMMIT")
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, cwd=here)
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changes = subprocess.run(status, capture_output=True, text=True, cwd=here)
    except OSError:
        return "unknown", False
    return head.stdout.strip() or "unknown", bool(changes.stdout.strip())
