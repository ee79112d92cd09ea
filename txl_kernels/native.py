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

from txl_kernels import philox, validate, visibility
from txl_kernels.call import Call, empty_gradients, empty_like_rows

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


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why this backend cannot take tensors of this device and dtype, of any head width; None if it can."""
    if device.type != "cpu":
        return f"native runs on the cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"native takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return missing()


@functools.cache
def find_openmp() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself uses; 0 if it uses none we know.

    Asked of torch's own library, whose dependencies the search follows: another package's copy cannot be mistaken for it.
    """
    try:
        torch_cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


@functools.cache
def prepare() -> Any:
    """The module, told to run on torch's own thread pool: a second one would fight it for the cores."""
    module.set_openmp(find_openmp())
    return module


def library_at(address: int) -> str | None:
    """Path of the shared library mapped at an address of this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(None, 5)
            low, high = (int(x, 16) for x in fields[0].split("-"))
            if low <= address < high and len(fields) == 6:
                return fields[5].rstrip()
    return None


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
    sizes += [call.window or 0, int(call.q.dtype == torch.bfloat16), torch.get_num_threads()]
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


def _check(call: Call) -> None:
    """What pointers rely on. `functional` has checked most of it; the operators can also be called directly."""
    reason = cannot_run(call.q.device, call.q.dtype)
    if reason is not None:
        raise RuntimeError(reason)
    validate.check(call)
    if call.start is not None or call.end is not None:
        visibility.check_values(call)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L])."""
    _check(call)
    out = empty_like_rows(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    prepare().forward(*_arguments(call, out, lse))
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, r, content_bias, position_bias, k_mem, v_mem; the last two empty without memory."""
    _check(call)
    dout, dlse = validate.check_backward(call, out, lse, dout, dlse)
    grads = empty_gradients(call)
    dq, dk, dv, dr, du, dw, *memory_grads = grads
    views = [dout, dq, dk, dv, *memory_grads, dr, du, dw]
    prepare().backward(*_arguments(call, out, lse), [_view(x) for x in views], 0 if dlse is None else dlse.data_ptr())
    return grads
