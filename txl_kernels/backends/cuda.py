"""The `cuda` backend: CUDA C++ kernels (csrc/cuda) for NVIDIA GPUs from sm_80 on.

The decode kernels compute forward of up to 16 queries, for evaluation and generation, and of up to
4 with Inkling's terms (`q_pos`, grouped heads, `sink`, `outside="zero"`). The Hopper kernels
(compute capability 9.0: H100, H200; bfloat16 and float16) compute forward of any number of queries,
and gradients. There is no compiler and no warm-up at run time. Kernels are enqueued on torch's
current stream after every argument was checked. The host reads no values back, so calls can be
captured in CUDA graphs.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from txl_kernels.backends import native_modules
from txl_kernels.backends.limits import DECODE, PREFILL
from txl_kernels.backends.protocol import Prepared, why_not_dtype, why_not_gpu
from txl_kernels.backends.route import is_decode, padded_widths, rows_apart, why_not
from txl_kernels.backends.zero_biases import with_biases
from txl_kernels.call import (
    ALL,
    Call,
    Wanted,
    changed,
    drop_threshold,
    empty_gradients,
    empty_like_rows,
    empty_out,
    memory_len_of,
)
from txl_kernels.torch_state import constant_when_traced

NAME = "cuda"
LIMITS = DECODE  # of q's dtype and width, for one of the two kernels at least
READS_BOUNDS = False
MAX_TABLES = 16  # the most slots of dr (two sums each) that give the same bits at every run
native = native_modules.load("_cuda", "CUDA")


def why_not_tensors(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Return the reason why the backend cannot run with tensors of this device, dtype and head
    width, or None."""
    reason: str | None = why_not_dtype(NAME, LIMITS, dtype, head_width) or _why_not_device(device)
    return reason


@constant_when_traced
def _why_not_device(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on a device at all, or None."""
    if device.type != "cuda":
        return f"cuda runs on CUDA devices, not on {device.type}"
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA GPUs, and this torch is built for ROCm; backend='triton' runs on AMD's GPUs"
    return native.why_not_loaded or why_not_gpu(device) or _why_not_driver()


@functools.cache
def _why_not_driver() -> str | None:
    """Return the reason why the module's own CUDA runtime cannot use the driver, or None: it may
    need a newer one than torch's."""
    reason = native.module.no_driver()
    return f"cuda cannot use the GPU: {reason}" if reason else None


def _widened(call: Call) -> Call:
    """Return the call with copies of the inputs that `padded_widths` names, or the call itself."""
    widths = padded_widths(call)
    return changed(call, **{name: _wider(getattr(call, name), n) for name, n in widths.items()}) if widths else call


def _wider(x: Tensor | None, width: int) -> Tensor | None:
    """Return x with zeros behind its rows. A table that all heads share is copied once."""
    if x is None or x.size(-1) == width:
        return x
    is_shared = x.dim() == 3 and x.stride(0) == 0
    source = x[:1] if is_shared else x
    wide = source.new_zeros((*source.shape[:-1], width))
    wide[..., : x.size(-1)] = source
    return wide.expand(x.size(0), -1, -1) if is_shared else wide


def forward(call: Call, prepared: Prepared | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return (out [B, H, L, D of v], lse float32 [B, H, L]) of a checked call. out has q's strides
    if q is dense."""
    q, v = call.q, call.v
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if need_lse else None
    if q.numel() == 0:
        return empty_out(q, v), lse
    if call.q_pos is not None:
        call = _widened(call)
    out = empty_like_rows(q)
    call = with_biases(call)
    plan = _plan(make_plan, call, out, prepared)
    workspace = q.new_empty(plan.workspace, dtype=torch.float32) if plan.workspace else None
    plan.forward(call, out, lse, 0 if workspace is None else workspace.data_ptr(), _stream(q.device))
    return out if v.size(3) == q.size(3) else empty_out(q, v).copy_(out[..., : v.size(3)]), lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted = ALL,
    prepared: Prepared | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's inputs, in their order; None where there is no input or
    its gradient is not wanted.

    dr is summed by atomics in any order; with torch.use_deterministic_algorithms(True) in a fixed
    order, which takes more launches and memory.

    Raises:
        RuntimeError: the Hopper kernels cannot compute the gradients of this call.
    """
    if call.q.numel() == 0:
        return tuple(None if x is None else x.zero_() for x in empty_gradients(call, wanted))
    if prepared is None or prepared.plan is None:
        # Forward of the raw operator does not know whether gradients follow.
        reason = why_not(call, PREFILL)
        if reason is not None:
            text = f"the kernels do not take {reason.text}" if reason.about == "formula" else reason.text
            raise RuntimeError(f"backend={NAME!r} cannot compute gradients: {text}; backend='triton' can")
    if call.q_pos is not None and (wide := _widened(call)) is not call:
        wide_out, wide_dout = (cast(Tensor, _wider(x, call.q.size(3))) for x in (out, dout))
        found = backward(wide, wide_out, lse, wide_dout, dlse, wanted, prepared)
        given = zip(empty_gradients(call, wanted), found, strict=True)
        return tuple(None if x is None or dx is None else x.copy_(dx[..., : x.size(-1)]) for x, dx in given)
    gradients = empty_gradients(call, wanted)
    call = with_biases(call)
    plan = _plan(prefill_plan, call, out, prepared)
    slots, tables = 0, 1
    if torch.are_deterministic_algorithms_enabled():
        slots = min(-(-_multiprocessors(call.q.device) // call.q.size(1)), MAX_TABLES)
        tables = 2 * slots  # TABLES_OF_SLOT in csrc/cuda/launch.h
    workspace = call.q.new_empty(plan.backward_workspace(gradients, slots, tables), dtype=torch.float32)
    if not ((dout.is_contiguous() and dout.data_ptr() % PREFILL.row_bytes == 0) or rows_apart(dout, PREFILL.row_bytes)):
        dout = dout.clone(memory_format=torch.contiguous_format)
    dlse = None if dlse is None else dlse.contiguous()
    stream = _stream(call.q.device)
    plan.backward(call, out, lse, dout, dlse, gradients, slots, tables, workspace.data_ptr(), stream)
    return gradients


def _plan(make: Callable[[Call, Tensor, int], Any], call: Call, out: Tensor, prepared: Prepared | None) -> Any:
    """Return the plan of a call: the one that calls of its signature keep, unless the memory had
    another length, as in a cache that grows."""
    memory_len = memory_len_of(call)
    if prepared is not None and prepared.plan is not None and prepared.plan[0] == memory_len:
        return prepared.plan[1]
    plan = make(call, out, _multiprocessors(call.q.device))
    plan.load()
    if prepared is not None:
        prepared.plan = memory_len, plan
    return plan


def make_plan(call: Call, out: Tensor, multiprocessors: int) -> Any:
    """Return the module's plan of a call, shared by calls of one signature: everything except the
    pointers."""
    if not is_decode(call):
        return prefill_plan(call, out, multiprocessors)
    return native.module.DecodePlan(
        call, out, LIMITS.dtypes.index(call.q.dtype), _drop_below(call), multiprocessors, _index(call)
    )


def prefill_plan(call: Call, out: Tensor, multiprocessors: int) -> Any:
    """Return the plan of prefill, or of backward for any number of queries."""
    return native.module.PrefillPlan(
        call, out, LIMITS.dtypes.index(call.q.dtype), _drop_below(call), multiprocessors, _index(call)
    )


def _index(call: Call) -> int:
    """Return the GPU's index; -1 for torch's current device."""
    return -1 if call.q.device.index is None else call.q.device.index


def _drop_below(call: Call) -> int:
    return drop_threshold(call.dropout_p) if call.seed is not None else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _stream(device: torch.device) -> int:
    """Return the handle of torch's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))
