"""The `native` backend: C++ on the CPU, float32 and bfloat16, float32 accumulation. Its kernels:
csrc/cpu."""

import ctypes
import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor

from txl_kernels.backends import native_modules
from txl_kernels.backends.protocol import HeadWidths, Plans, unsupported
from txl_kernels.call import ALL, Call, Wanted, drop_threshold, empty_gradients, empty_out

NAME = "native"
DTYPES = (torch.float32, torch.bfloat16)  # in the order of txl::Type
HEAD_WIDTHS = HeadWidths()
READS_BOUNDS = True
native = native_modules.load("_native", "C++")


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why this backend cannot take tensors of this device and dtype, of any head width; None if it
    can."""
    if device.type != "cpu":
        return f"{NAME} runs on the cpu, not on {device.type}"
    return unsupported(NAME, DTYPES, HEAD_WIDTHS, dtype, head_width) or native.missing


def refuses(call: Call) -> str | None:
    """Takes every call."""
    return None


def forward(call: Call, plans: Plans | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L]) of a checked
    call."""
    out = empty_out(call.q, call.v)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32) if need_lse else None
    plan = None if plans is None else plans.get(NAME)
    if plan is None:
        plan = make_plan(call, out)
        if plans is not None:
            plans[NAME] = plan
    plan.forward(call, out, lse, torch.get_num_threads(), _seed(call), _planes(call))
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted = ALL,
    plans: Plans | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the call's inputs, in their order; empty where there is no input or none is
    wanted."""
    grads = empty_gradients(call, wanted)
    key = (NAME, out.stride())  # forward's plan is of the strides that it gave
    plan = None if plans is None else plans.get(key)
    if plan is None:
        plan = make_plan(call, out)
        if plans is not None:
            plans[key] = plan
    plan.backward(call, out, lse, dout, dlse, grads, wanted, torch.get_num_threads(), _seed(call), _planes(call))
    return grads


def make_plan(call: Call, out: Tensor) -> Any:
    """The call as the module knows it, without pointers: what calls of one signature share."""
    drop_below = drop_threshold(call.dropout_p) if call.seed is not None else 0
    return prepare().Plan(call, out, DTYPES.index(call.q.dtype), drop_below)


def _seed(call: Call) -> int:
    return 0 if call.seed is None else int(call.seed) & (2**64 - 1)


PLANES = {"highest": 3, "high": 2, "medium": 1}


def _planes(call: Call) -> int:
    """How many bfloat16 a float32 is the sum of where units multiply those, by
    `torch.set_float32_matmul_precision`."""
    if call.q.dtype != torch.float32 or not native.module.splits():
        return PLANES["highest"]
    try:
        return PLANES[torch.get_float32_matmul_precision()]
    except RuntimeError:  # said by torch.backends.fp32_precision, which this function refuses to tell
        matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - torch's stubs lack it
        return {"tf32": 2, "bf16": 1}.get(matmul.fp32_precision, 3)


@functools.cache
def prepare() -> Any:
    """The module, told to run on torch's own thread pool: a second one would fight it for the
    cores."""
    native.module.set_openmp(find_openmp())
    return native.module


@functools.cache
def find_openmp() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself uses; 0 if it uses none we
    know.

    Asked of torch's own library, whose dependencies the search follows: another package's copy
    cannot be mistaken for it. GCC's runtime has it, and LLVM's, which torch brings for macOS.
    """
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        torch_cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


class _Found(ctypes.Structure):  # Dl_info of dladdr(3)
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def library_at(address: int) -> str | None:
    """Path of the shared library that is loaded at an address of this process; None if there is
    none."""
    dladdr, found = ctypes.CDLL(None).dladdr, _Found()
    dladdr.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return os.fsdecode(found.file) if dladdr(address, ctypes.byref(found)) else None
