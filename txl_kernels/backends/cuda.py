"""The `cuda` backend: CUDA C++ for NVIDIA GPUs from sm_80 on.

Forward of up to 16 queries, for evaluation and generation.
No compiler and no warm-up at run time. Its kernels, csrc/cuda, are enqueued on torch's current
stream after every argument was checked; nothing is read back, so calls can be captured in graphs.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from txl_kernels.backends import native_modules
from txl_kernels.backends.devices import gpu_lacks
from txl_kernels.backends.protocol import HeadWidths, Plans, unsupported
from txl_kernels.call import Call, dropout
from txl_kernels.call.fields import ALL, Wanted, empty_like_rows, memory_len_of, needs_gradients

NAME = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of txl::Type
HEAD_WIDTHS = HeadWidths(multiple_of=8, most=256)
READS_BOUNDS = False
# Whether a device's record of it lies in benchmarks/results/. Until then it runs only when asked
# for by name.
VERIFIED = False
MOST_QUERIES, MOST_KEYS, MOST_HEADS = 16, 2**23, 65535
# What backend=None gives it once it is verified: beyond, Triton's matrix units have less arithmetic
# to do.
FASTER_UP_TO = 4
native = native_modules.load("_cuda", "CUDA")


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why this backend cannot take tensors of this device, dtype and head width; None if it can."""
    reason: str | None = unsupported(NAME, DTYPES, HEAD_WIDTHS, dtype, head_width) or _absent_from(device)
    return reason


def _absent_from(device: torch.device) -> str | None:
    """Why the kernels do not run on a device at all."""
    if device.type != "cuda":
        return f"cuda runs on CUDA devices, not on {device.type}"
    return native.missing() or gpu_lacks(device) or _driver_lacks()


@functools.cache
def _driver_lacks() -> str | None:
    """The module's own runtime may want a newer driver than torch's."""
    reason = native.module.no_driver()
    return f"cuda cannot use the GPU: {reason}" if reason else None


# As in the triton backend: torch.compile asks once, while it traces.
setattr(_absent_from, "_dynamo_marked_constant", True)  # noqa: B010


def refuses(call: Call) -> str | None:
    """Why this call is none for these kernels; None if it is."""
    if call.q.size(2) > MOST_QUERIES:
        return f"it takes at most {MOST_QUERIES} queries (L), got {call.q.size(2)}; backend='triton' takes any number"
    if needs_gradients(call):
        return "it computes no gradients; call it under torch.no_grad(), or use backend='triton'"
    if call.q.size(1) > MOST_HEADS:
        return f"it takes at most {MOST_HEADS} heads (H), got {call.q.size(1)}; backend='triton' takes any number"
    keys = memory_len_of(call) + call.q.size(2)
    keys = keys if call.window is None else min(keys, call.window + call.q.size(2) - 1)
    if keys > MOST_KEYS:
        return (
            f"it takes at most {MOST_KEYS} keys (M + L, or the window), got {keys}; backend='triton' takes any number"
        )
    return None


def forward(call: Call, plans: Plans | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out [B, H, L, D] with q's strides where it is dense, lse float32 [B, H, L]) of a checked
    call."""
    q = call.q
    out = empty_like_rows(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if need_lse else None
    if q.numel() == 0:
        return out, lse
    with _on(q.device):
        plan = None if plans is None else plans.get(NAME)
        if plan is None:
            plan = make_plan(call, out, _multiprocessors(q.device))
            if plans is not None:
                plan.load()
                plans[NAME] = plan
        workspace = q.new_empty(plan.workspace, dtype=torch.float32)
        plan.forward(call, out, lse, workspace.data_ptr(), _stream(q.device))
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
    """There is none; `rel_attention` says so before, this is for who calls the operator itself."""
    raise NotImplementedError("backend='cuda' computes no gradients")


def make_plan(call: Call, out: Tensor, multiprocessors: int) -> Any:
    """The call as the module knows it, without pointers: what calls of one signature share."""
    drop_below = dropout.drop_threshold(call.dropout_p) if call.seed is not None else 0
    return native.module.Plan(call, out, DTYPES.index(call.q.dtype), drop_below, multiprocessors)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.index != torch.cuda.current_device() else contextlib.nullcontext()


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
