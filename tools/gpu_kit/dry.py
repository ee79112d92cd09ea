"""Calls whose kernels are compiled and not launched: tensors on the CPU, for a Hopper GPU.

What they find in Triton's cache, or put there, is what the same calls find on the device. Where
there is a CUDA driver, Triton's C functions that launch are compiled, too.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # nothing is compiled under it

import torch
import triton
from pretended_gpu import pretended_gpu
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gpu_kit import yardstick
from gpu_kit.work import Work, both, choices, tensors

CAPABILITY = 90
MULTIPROCESSORS = 132
SHARED = 232_448  # bytes that a program may have


class Compiled(NamedTuple):
    """Kernels by their folders in the cache: those found, those compiled; and what failed, by name
    of the work."""

    found: tuple[str, ...]
    made: tuple[str, ...]
    failed: dict[str, str]


class _Nothing:
    """In place of a launch. On a device's machine the launcher is compiled."""

    def __init__(self, src: Any, metadata: Any) -> None:
        if torch.cuda.is_available():
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(src, metadata)

    def __call__(self, *_: Any) -> None:
        pass


class _Utils:
    """Of the driver, as far as a launch asks."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": MULTIPROCESSORS}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024


class Driver:
    """Triton's driver of a Hopper GPU that is not there."""

    launcher_cls = _Nothing
    utils = _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


@contextlib.contextmanager
def dry() -> Iterator[None]:
    """The `triton` backend takes tensors on the CPU and launches nothing."""
    before = driver._active
    driver.set_active(Driver())
    with contextlib.ExitStack() as stack:
        stack.callback(driver.set_active, before)
        stack.enter_context(pretended_gpu(CAPABILITY, MULTIPROCESSORS))
        yield


def compile_one(work: Work) -> Compiled:
    """Of one work; in a process that does nothing at the same time."""
    found: dict[str, bool] = {}

    def listen(*, metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
        folder = os.path.basename(os.path.dirname(next(iter(metadata_group.values()))))
        found.setdefault(folder, cache_hit)

    failed = {}
    with dry(), mock.patch.object(triton.knobs.compilation, "listener", listen):
        try:
            if work.backend == yardstick.NAME:
                yardstick.flash(work, "cpu", torch.empty)
            else:
                with choices(work):
                    both(work, tensors(work, "cpu", torch.empty))
        except Exception as error:
            failed[f"{work.name} {work.kernel} D{work.D}"] = f"{type(error).__name__}: {error}"[:400]
    hits, misses = (tuple(x for x, hit in found.items() if hit is wanted) for wanted in (True, False))
    return Compiled(hits, misses, failed)


def compile_all(works: Sequence[Work], processes: int, adopt: Any = None) -> Compiled:
    """Every work, shared out. adopt: called first in each process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=adopt) as pool:
        each = list(pool.imap_unordered(compile_one, [x for x in works if x.backend != "cuda"], chunksize=1))
    hits, misses = set().union(*(x.found for x in each)), set().union(*(x.made for x in each))
    failed = {name: reason for x in each for name, reason in x.failed.items()}
    return Compiled(tuple(sorted(hits - misses)), tuple(sorted(misses)), failed)
