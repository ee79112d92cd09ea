"""The `native` backend: C++ on the CPU, float32 and bfloat16, float32 accumulation.

Passes pointers and strides to `txl_kernels._native` after `functional` has checked every argument.
"""

import ctypes
import functools
import importlib
import os
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from txl_kernels import philox, visibility
from txl_kernels.call import Call

module: Any
try:
    module = importlib.import_module("txl_kernels._native")
except ImportError as error:
    module = None
    _import_error = error

DTYPES = (torch.float32, torch.bfloat16)


def missing() -> str | None:
    """Why the C++ module is not there; None if it is."""
    if module is not None:
        return None
    note = resources.files("txl_kernels").joinpath("_native_missing.txt")
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return f"the C++ module could not be loaded: {_import_error}"


def cannot_run(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot take tensors of this device and dtype; None if it can."""
    if device.type != "cpu":
        return f"native runs on the cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"native takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return missing()


@functools.cache
def find_openmp() -> str | None:
    """Path of the OpenMP runtime torch has loaded into this process; None if it cannot be told."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split(None, 5)[5].rstrip() for line in maps if "omp" in line and "/" in line}
    except OSError:
        return None
    inside_torch = os.path.dirname(os.path.dirname(torch.__file__))
    found = sorted(p for p in paths if os.path.basename(p).startswith(("libgomp", "libomp", "libiomp")))
    return next((p for p in found if p.startswith(inside_torch)), found[0] if found else None)


@functools.cache
def prepare() -> Any:
    """The module, told to run on torch's own thread pool: a second one would fight it for the cores."""
    path = find_openmp()
    if path is not None and hasattr(ctypes.CDLL(path), "GOMP_parallel"):
        entry = ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        module.set_openmp(entry or 0)
    return module


def _view(x: Tensor | None) -> list[int]:
    """[pointer, three strides] of a [.., .., .., D] tensor; fewer axes are padded with stride 0."""
    if x is None:
        return [0, 0, 0, 0]
    strides = list(x.stride()[:-1])
    return [x.data_ptr(), *strides, *[0] * (3 - len(strides))]


def _bounds(x: Tensor | None) -> list[int]:
    return [0, 0, 0] if x is None else [x.data_ptr(), *x.stride()]


def _arguments(call: Call, out: Tensor, lse: Tensor) -> list[Any]:
    batch, heads, length, width = call.q.shape
    sizes = [batch, heads, length, call.memory_len, width, call.r.size(1), call.zero_row, int(call.causal)]
    # A window wider than every distance hides nothing, and may not fit in 64 bits.
    sizes += [min(call.window or 0, 2**31), int(call.q.dtype == torch.bfloat16), torch.get_num_threads()]
    drop = call.dropout_p > 0 and call.seed is not None
    seed = int(call.seed) & (2**64 - 1) if drop and call.seed is not None else 0
    tensors = [call.q, call.k, call.v, call.k_mem, call.v_mem, call.r, call.content_bias, call.position_bias, out]
    return [
        sizes,
        float(call.scale),
        philox.drop_threshold(call.dropout_p) if drop else 0,
        1.0 / (1.0 - call.dropout_p),
        seed,
        [_view(x) for x in tensors],
        _bounds(call.start),
        _bounds(call.end),
        lse.data_ptr(),
    ]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L])."""
    if call.start is not None or call.end is not None:
        visibility.check_values(call)
    out = torch.empty_like(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    prepare().forward(*_arguments(call, out, lse))
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, r, content_bias, position_bias, k_mem, v_mem; the last two empty without memory."""
    if dout.size(-1) > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.float().contiguous()
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v, call.r, call.content_bias, call.position_bias)]
    memory_grads = [call.q.new_empty(0) if x is None else torch.empty_like(x) for x in (call.k_mem, call.v_mem)]
    dq, dk, dv, dr, du, dw = grads
    views = [dout, dq, dk, dv, *memory_grads, dr, du, dw]
    prepare().backward(*_arguments(call, out, lse), [_view(x) for x in views], 0 if dlse is None else dlse.data_ptr())
    return (*grads, *memory_grads)
