"""What a step's process does, by name: part(record, arguments)."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_kit import places
from gpu_kit.records import Record, work_through


def _modules(record: Record) -> None:
    from gpu_kit import modules

    work_through(record, "modules", [("_native and _cuda", modules.provide)])


def _kernels(record: Record, number: str) -> None:
    """Those of one call, in as many processes as there are cores."""
    from gpu_kit import caches, cases, dry

    begun = time.monotonic()
    target = places.triton_cache()
    adopt = functools.partial(caches.adopt, places.CARRIED, dry.CAPABILITY)
    unpacked, reason = 0, adopt()
    if reason is None:
        unpacked = caches.unpack(places.CARRIED, target)
    done = dry.compile_all(cases.call(int(number)), os.cpu_count() or 1, adopt)
    record.add(
        step="kernels", item=f"call {number}", state="measured", unpacked=unpacked, not_adopted=reason,
        found=len(done.found), compiled=len(done.made), failed=done.failed, seconds=round(time.monotonic() - begun, 1),
    )  # fmt: skip


def _adopted(name: str, record: Record, *_: str) -> None:
    """Works through the items of gpu_kit.<name> with the carried kernels."""
    import importlib

    from gpu_kit import measure

    _adopt()
    module = importlib.import_module(f"gpu_kit.{name}")
    with _launched(record, name):
        work_through(record, name.replace("_", " "), module.items(), measure.alive)


@contextlib.contextmanager
def _launched(record: Record, name: str) -> Iterator[None]:
    """Also records how many kernels were found and how many compiled."""
    import triton

    count = {True: 0, False: 0}

    def listen(*, cache_hit: bool, **_: Any) -> None:
        count[cache_hit] += 1

    triton.knobs.compilation.listener = listen
    yield
    record.add(step="kernels", item=name, state="measured", found=count[True], compiled=count[False], not_adopted=None)


def _adopt() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") != "1":
        from gpu_kit import caches, dry

        caches.adopt(places.CARRIED, dry.CAPABILITY)


def _machine(record: Record) -> None:
    from gpu_kit import machine, measure

    work_through(record, "machine", machine.items(places.CARRIED), measure.alive)


def _smoke_cuda(record: Record) -> None:
    from gpu_kit import measure, smoke

    work_through(record, "smoke, CUDA C++", smoke.items("cuda"), measure.alive)


def _rates(record: Record, program: str) -> None:
    from gpu_kit import rates

    rates.run(record, Path(program))


def _counters(record: Record, width: str) -> None:
    """This process starts the profiler, which starts `small`."""
    from gpu_kit import counters

    again = [sys.executable, "-m", "gpu_kit", "part", "small", str(record.path), width]
    done = subprocess.run([*counters.COMMAND, *again], capture_output=True, text=True)
    print(done.stderr[-2000:])
    counters.keep(record, done.stdout, int(width))


def _small(record: Record, width: str) -> None:
    from gpu_kit import counters

    _adopt()
    counters.small(int(width))


def _tests(record: Record, shards: str, seconds: str, marker: str, *paths: str) -> None:
    from gpu_kit import shards as sharing

    sharing.run(record, int(shards), float(seconds), marker, list(paths))


PARTS: dict[str, Callable[..., None]] = {
    "modules": _modules, "kernels": _kernels, "machine": _machine, "smoke_cuda": _smoke_cuda, "rates": _rates,
    "counters": _counters, "small": _small, "tests": _tests,
    **{name: functools.partial(_adopted, name) for name in ("smoke", "times", "same_bits", "sweep")},
}  # fmt: skip
