"""Contexts in which the `triton` backend accepts CPU tensors as if they were on a GPU. Launches are
replaced by the caller, or (`on_hopper`) kernels are compiled for sm_90 and not launched."""

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from txl_kernels.backends import triton as backend
from txl_kernels.backends.triton import passes, plan


@contextlib.contextmanager
def pretended_gpu(capability: int, multiprocessors: int) -> Iterator[None]:
    """A context in which launches are planned for a GPU; capability: 80 or 90. Plans are not cached
    beyond it."""
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(backend, "_why_not_device", return_value=None))
        stack.enter_context(patch(plan, "capability", lambda device: divmod(capability, 10)))
        for module in (plan, passes):
            stack.enter_context(patch(module, "multiprocessors", lambda device: multiprocessors))
        plan.clear_layouts()
        stack.callback(plan.clear_layouts)
        yield


_DEVICES = itertools.count(1000)  # a new number for each driver, since Triton caches compiled kernels by device


def _launch(*arguments: object) -> None:
    """Replacement of Triton's native launcher; it does nothing."""


class _Driver:
    """A Triton driver for a device of sm_90 that launches nothing."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.device = next(_DEVICES)
        self.utils = SimpleNamespace(
            launch=_launch,
            # returns module, function, registers, spills, maximum threads
            load_binary=lambda name, *rest: (1, name, 0, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            build_signature_metadata=tuple,
            fill_tma_descriptor=lambda *args: args,  # Triton 3.6
            fill_tma_descriptor_tiled=lambda *args: args,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def on_hopper() -> Iterator[None]:
    """A context in which the `triton` backend accepts CPU tensors as if they were on a GPU; kernels
    are compiled for sm_90 and not launched."""
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(triton.runtime.driver, "_active", _Driver()))
        if hasattr(nvidia, "compile_module_from_src"):  # Triton 3.6 compiles a launcher for each signature
            compiled = SimpleNamespace(launch=_launch)
            stack.enter_context(patch(nvidia, "compile_module_from_src", lambda **source: compiled))
            stack.enter_context(patch(nvidia, "library_dirs", list))
        else:
            stack.enter_context(patch(nvidia, "PyKernelArg", lambda nested_tuple, type: type))
            stack.enter_context(patch(nvidia, "ARG_KERNEL", "argument"))
            stack.enter_context(patch(nvidia, "ARG_CONSTEXPR", "constant"))
        stack.enter_context(patch(torch.Tensor, "zero_", lambda x: x))
        stack.enter_context(pretended_gpu(90, 132))
        yield
