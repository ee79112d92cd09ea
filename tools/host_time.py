"""Processor time that a call of the Triton backend takes on the host, for Hopper; without a GPU.

    python tools/host_time.py

First the backend alone, then `rel_attention` as a model calls it, also as where there is no C++
module, and with a memory that is longer at every call. Kernels are compiled for sm_90 and go
through Triton's own launcher in Python, up to its native part: that a kernel is launched and a
descriptor encoded is left out. Tensors lie on the CPU, whose allocator stands for the device's. The
zeros that atomics add to are left out, too: one kernel that torch launches.
"""

import contextlib
import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from pretended_gpu import pretended_gpu
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel

from txl_kernels import rel_attention
from txl_kernels.backends import cpu
from txl_kernels.backends import triton as backend
from txl_kernels.backends.native_modules import NativeModule
from txl_kernels.call import Call

ROUNDS, CALLS = 40, 20
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
B, H, L, D = 8, 16, 512, 64
CASES: dict[str, dict[str, Any]] = {
    "no memory": {},
    "memory": {"memory": L},
    "bounds": {"bounds": True},
    "dropout": {"dropout": 0.1},
}
STREAM = 7
_DEVICES = itertools.count(1000)  # each driver's own: Triton keeps what it compiled by the device


class Driver:
    """A device of sm_90 for Triton, of which `launch` is all that happens.

    launch: takes what Triton's native launcher takes.
    """

    launcher_cls = nvidia.CudaLauncher

    def __init__(self, launch: Callable[..., None]) -> None:
        self.device = next(_DEVICES)
        self.utils = SimpleNamespace(
            launch=launch,
            load_binary=lambda name, *rest: (1, name, 0, 0, 1024),  # module, function, registers, spills, threads
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            build_signature_metadata=tuple,
            fill_tma_descriptor=lambda *args: args,  # Triton 3.6
            fill_tma_descriptor_tiled=lambda *args: args,
        )

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def on_hopper(launch: Callable[..., None]) -> Iterator[None]:
    """The `triton` backend takes tensors that are not on a GPU as if they were; `launch` is called
    for its kernels."""
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(triton.runtime.driver, "_active", Driver(launch)))
        if hasattr(nvidia, "compile_module_from_src"):  # Triton 3.6 compiles a launcher for each signature
            compiled = SimpleNamespace(launch=launch)
            stack.enter_context(patch(nvidia, "compile_module_from_src", lambda **source: compiled))
            stack.enter_context(patch(nvidia, "library_dirs", list))
        else:
            stack.enter_context(patch(nvidia, "PyKernelArg", lambda nested_tuple, type: type))
            stack.enter_context(patch(nvidia, "ARG_KERNEL", "argument"))
            stack.enter_context(patch(nvidia, "ARG_CONSTEXPR", "constant"))
        stack.enter_context(patch(torch.Tensor, "zero_", lambda x: x))
        stack.enter_context(pretended_gpu(90, 132))
        yield


def call_of(memory: int = 0, bounds: bool = False, dropout: float = 0.0) -> Call:
    """Tensors as a model hands them on: heads next to each other in a row."""

    def rows(n: int) -> torch.Tensor:
        return torch.zeros(B, n, H, D, dtype=torch.bfloat16).transpose(1, 2)

    earlier = (rows(memory), rows(memory)) if memory else (None, None)
    start = torch.zeros(B, L, dtype=torch.int32) if bounds else None
    r, bias = torch.zeros(H, memory + L, D, dtype=torch.bfloat16), torch.zeros(H, D, dtype=torch.bfloat16)
    seed = torch.zeros(1, dtype=torch.int64) if dropout else None
    return Call(
        rows(L), rows(L), rows(L), r, bias, bias, *earlier, None, start, None, seed, 0, None, 0, 0.125, dropout, 0.0
    )


def _nothing(*args: Any) -> None:
    pass


def microseconds(function: Callable[..., Any], *given: Any) -> str:
    """Of a call: the median of ROUNDS, and the least."""
    for _ in range(3):
        function(*given)
    times = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            function(*given)
        times.append((time.thread_time() - begin) / CALLS * 1e6)
    return f"{statistics.median(times):.0f} ({min(times):.0f})"


def whole_call() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """`rel_attention` without gradients, and with backward."""
    call = call_of(memory=L)
    *inputs, k_mem, v_mem = call[:8]
    for x in inputs:
        x.requires_grad_()
    dout = torch.zeros_like(call.q)

    def forward() -> torch.Tensor:
        return rel_attention(*inputs, (k_mem, v_mem), backend="triton")

    def both() -> None:
        with torch.enable_grad():
            torch.autograd.grad(forward(), inputs, dout)

    return forward, both


def growing() -> Callable[[], Any]:
    """One query, with a memory that is a key longer at every call."""
    last = torch.zeros(B, 1, H, D, dtype=torch.bfloat16).transpose(1, 2)
    call = call_of(memory=4 * ROUNDS * CALLS)
    k_mem, v_mem = call.k_mem, call.v_mem
    keys = itertools.count(1)

    def forward() -> torch.Tensor:
        n = next(keys)
        memory = k_mem[:, :, :n], v_mem[:, :, :n]
        return rel_attention(last, last, last, call.r[:, : n + 1], *call[4:6], memory, backend="triton")

    return forward


def main() -> None:
    for option, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_MAX, 0)):
        ctypes.CDLL(None).mallopt(option, value)  # what is freed is kept, as a device's allocator does
    print(f"B {B}, H {H}, L {L}, D {D}, bfloat16: microseconds a call, median (least).")
    print("| | forward | without Triton's launcher | backward | without Triton's launcher |")
    print("|---|---|---|---|---|")
    with torch.no_grad(), on_hopper(_nothing):
        for name, options in CASES.items():
            call = call_of(**options)
            out, lse = backend.forward(call)
            cells = []
            for function, given in ((backend.forward, (call,)), (backend.backward, (call, out, lse, out, None))):
                cells.append(microseconds(function, *given))
                with mock.patch.object(CompiledKernel, "run", _nothing):
                    cells.append(microseconds(function, *given))
            print(f"| {name} |", " | ".join(cells), "|")
        print("\n| rel_attention | forward | forward and backward |\n|---|---|---|")
        forward, both = whole_call()
        print(f"| memory | {microseconds(forward)} | {microseconds(both)} |")
        with mock.patch.object(cpu, "native", NativeModule(missing="no compiler")):
            print(f"| without the C++ module | {microseconds(forward)} | {microseconds(both)} |")
        print(f"| one query, a longer memory at every call | {microseconds(growing())} | |")


if __name__ == "__main__":
    main()
