"""The machine under test: its device, dtype and backends, its clocks, its caches, and what records
call it."""

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
_BEYOND_CACHES = 2**28  # bytes: more than the last-level cache that 2 to 64 cores of today's processors share


class Machine:
    """The CPU, the GPU, or ("interpreter") tiny problems in Triton's interpreter, whose times mean
    nothing."""

    def __init__(self, kind: str) -> None:
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "interpreter" and not internals.interpreted():
            raise ValueError("--device interpreter needs TRITON_INTERPRET=1 in the environment")
        self.kind = kind
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        self.dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        names = ["triton"] if kind == "interpreter" else available_backends(self.device, self.dtype)
        self.backends = [name for name in names if name not in ("cuda", "reference")]
        self.backends_for_few_queries = [name for name in names if name != "reference"]

    def pick(self, *, cpu: T, cuda: T, interpreter: T) -> T:
        """What suits this machine."""
        return {"cpu": cpu, "cuda": cuda, "interpreter": interpreter}[self.kind]

    def wall(self, run: Run) -> float:
        """Seconds until the result is there, launches included."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def on_device(self, run: Run) -> float:
        """Seconds between events around each of many launches, the L2 cache flushed before; waits
        of the device included."""
        if self.kind != "cuda":
            return self.wall(run)
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=40, return_mode="median")) / 1e3

    def cold(self, run: Run) -> float:
        """As `on_device`, after the caches were filled with something else, as the other layers of
        a model would."""
        if self.kind == "cpu":
            self._evict()
        return self.on_device(run)

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """What a comparison leaves behind goes back: to the system, or to other processes on the
        GPU."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()

    def _evict(self) -> None:
        _elsewhere().sum()

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def name(self) -> str:
        if self.kind == "interpreter":
            return "interpreter"
        return torch.cuda.get_device_name() if self.kind == "cuda" else _cpu_name()

    def about(self) -> dict[str, Any]:
        """What a record says of where its figures come from."""
        commit, dirty = _commit()
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "kind": self.kind, "device": self.name, "cpu": _cpu_name(), "cores": os.cpu_count(),
            "threads": self.threads, "isa": internals.instruction_set(),
            "dtype": str(self.dtype).removeprefix("torch."), "backends": self.backends_for_few_queries,
            "python": platform.python_version(), "torch": torch.__version__,
            "cuda": torch.version.cuda if self.kind == "cuda" else None, "triton": _version("triton"),
            "transformers": _version("transformers"), "txl_kernels": txl_kernels.__version__,
            "commit": commit, "uncommitted_changes": dirty, "command": " ".join(["pytest", *sys.argv[1:]]),
        }  # fmt: skip

    def slug(self) -> str:
        """The machine's name for a file."""
        name = self.name if self.kind == "cuda" else f"{self.name}-{self.threads}t"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def trim() -> None:
    """glibc keeps freed blocks otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _elsewhere() -> torch.Tensor:
    return torch.ones(_BEYOND_CACHES // 4)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _commit() -> tuple[str, bool]:
    """Of the folder the benchmarks are in; whether tracked files differ from it. BENCHMARK_COMMIT
    says it, as git describe --dirty does, where a tree has travelled without its history."""
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
