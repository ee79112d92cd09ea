"""The `cuda` backend: CUDA C++ for NVIDIA GPUs from sm_80 on, forward of up to 16 queries (evaluation, generation).

No compiler and no warm-up at run time. Passes pointers and strides to `txl_kernels._cuda`, whose kernels are enqueued on
torch's current stream after `functional` has checked every argument; it reads nothing back and can be captured in graphs.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from txl_kernels import extension, gpu, philox
from txl_kernels.call import Call, empty_like_rows

module, _import_error = extension.load("_cuda")

# Whether a device's record of it lies in benchmarks/results/. Until then it runs only when asked for by name.
VERIFIED = False
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of txl_cuda::Type
MOST_QUERIES, MAX_HEAD_WIDTH, MOST_KEYS, MOST_HEADS = 16, 256, 2**23, 65535
# What backend=None gives it once it is verified: beyond, Triton's matrix units have less arithmetic to do.
FASTER_UP_TO = 4


def missing() -> str | None:
    """Why the CUDA module is not there; None if it is."""
    return None if module is not None else extension.why_missing("_cuda", "CUDA", _import_error)


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why this backend cannot take tensors of this device, dtype and head width; None if it can."""
    if dtype not in DTYPES:
        return f"cuda takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_width % 8 or not 8 <= head_width <= MAX_HEAD_WIDTH:
        return f"cuda takes head widths that are multiples of 8 up to {MAX_HEAD_WIDTH}, not {head_width}"
    reason: str | None = _absent_from(device)
    return reason


def _absent_from(device: torch.device) -> str | None:
    """Why the kernels do not run on a device at all."""
    if device.type != "cuda":
        return f"cuda runs on CUDA devices, not on {device.type}"
    if missing() is not None:
        return missing()
    return gpu.lacks(device) or _driver_lacks()


@functools.cache
def _driver_lacks() -> str | None:
    """The module's own runtime may want a newer driver than torch's."""
    reason = module.no_driver()
    return f"cuda cannot use the GPU: {reason}" if reason else None


# As in txl_kernels/triton: torch.compile asks once, while it traces.
setattr(_absent_from, "_dynamo_marked_constant", True)  # noqa: B010


def refuses(call: Call) -> str | None:
    """Why this call is none for these kernels; None if it is."""
    if call.q.size(2) > MOST_QUERIES:
        return f"it takes at most {MOST_QUERIES} queries (L), got {call.q.size(2)}; backend='triton' takes any number"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:8]):
        return "it computes no gradients; call it under torch.no_grad(), or use backend='triton'"
    if call.q.size(1) > MOST_HEADS:
        return f"it takes at most {MOST_HEADS} heads (H), got {call.q.size(1)}; backend='triton' takes any number"
    keys = call.memory_len + call.q.size(2)
    keys = keys if call.window is None else min(keys, call.window + call.q.size(2) - 1)
    if keys > MOST_KEYS:
        return (
            f"it takes at most {MOST_KEYS} keys (M + L, or the window), got {keys}; backend='triton' takes any number"
        )
    return None


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.index != torch.cuda.current_device() else contextlib.nullcontext()


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of the first three axes, [n0, n1, n2, D]; 0 for those that are missing."""
    if x is None:
        return 0, 0, 0
    strides = (*x.stride()[:-1], 0, 0)
    return strides[0], strides[1], strides[2]


def _rows_aligned(x: Tensor | None) -> bool:
    """Whether every row starts at a multiple of 16 bytes if the first does."""
    if x is None or x.numel() == 0:
        return True
    unit = 16 // x.element_size()
    return all(stride % unit == 0 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)


def _plan(call: Call, out: Tensor) -> Any:
    """What calls of the same signature share."""
    q, r = call.q, call.r
    B, H, L, D = q.shape
    sizes = (B, H, L, call.memory_len, D, r.size(1), call.zero_row, call.causal, call.window or 0)
    drop = call.dropout_p if call.seed is not None else 0.0
    views = (q, call.k, call.v, call.k_mem, call.v_mem, r, call.content_bias, call.position_bias, out)
    bounds = [(0, 0) if x is None else x.stride() for x in (call.start, call.end)]
    return module.Plan(
        DTYPES.index(q.dtype), sizes, call.scale, philox.drop_threshold(drop), 1.0 / (1.0 - drop),
        [_strides(x) for x in views], bounds, all(map(_rows_aligned, views[1:6])), _multiprocessors(q.device),
    )  # fmt: skip


def forward(call: Call, memo: dict[str, Any] | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L]) of a checked call.

    memo: kept between calls of the same signature.
    """
    q = call.q
    out = empty_like_rows(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if need_lse else None
    if q.numel() == 0:
        return out, lse
    plan = None if memo is None else memo.get("cuda")
    if plan is None:
        plan = _plan(call, out)
        if memo is not None:
            memo["cuda"] = plan
    tensors = (q, call.k, call.v, call.k_mem, call.v_mem, call.r, call.content_bias, call.position_bias, out,
               call.start, call.end, call.seed, lse)  # fmt: skip
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    workspace = q.new_empty(plan.workspace(pointers), dtype=torch.float32)
    with _on(q.device):
        plan.forward(pointers, workspace.data_ptr(), _stream(q.device))
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """There is none; `rel_attention` says so before, this is for who calls the operator itself."""
    raise NotImplementedError("backend='cuda' computes no gradients")
