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
from txl_kernels.backends.protocol import HeadWidths, Prepared, architecture, why_not_dtype, why_not_gpu
from txl_kernels.backends.zero_biases import with_biases
from txl_kernels.call import (
    ALL,
    INPUTS,
    Call,
    Fields,
    Wanted,
    changed,
    drop_threshold,
    empty_gradients,
    empty_like_rows,
    empty_out,
    first_refused,
    inputs_of,
    memory_len_of,
    needs_gradients,
    position_width_of,
    refused_by,
)
from txl_kernels.torch_state import constant_when_traced

NAME = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in the order of txl::Type
HEAD_WIDTHS = HeadWidths(multiple_of=8, maximum=256)
READS_BOUNDS = False
MAX_DECODE_QUERIES, MAX_DECODE_KEYS, MAX_HEADS = 16, 2**23, 65535
MAX_TERM_QUERIES = 4  # of decode with Inkling's terms
# The kernels of prefill and of gradients.
HOPPER, HOPPER_DTYPES, HOPPER_WIDTH = (9, 0), (torch.bfloat16, torch.float16), 128
ROW_BYTES = 16
MAX_PREFILL_KEYS = 2**26 - 128  # the rings' offsets, 32 for each key, are 32-bit integers
MAX_BATCH = 65535  # of prefill, where batch rows are the last axis of the grid
MAX_TABLES = 16  # the most slots of dr (two sums each) that give the same bits at every run
# The smallest number of queries for which the Hopper kernels run where both could: the decode
# kernels are faster for one query alone (H100).
MIN_HOPPER_QUERIES = 2
# The largest number of queries for which backend=None chooses the decode kernels: their calls take
# 0.15 ms less of the host's time than Triton's (H200). On the device Triton's take less from 2
# queries on, and for 64 batch rows from one.
FASTER_UP_TO = 4
POSITION_WIDTHS = (8, 16)  # of q_pos, in the Hopper kernels
native = native_modules.load("_cuda", "CUDA")


def _refused() -> tuple[Fields, Fields, Fields]:
    """Return the fields that neither kernels take, those that decode alone does not take, and those
    that prefill alone does not take."""
    decode, prefill = refused_by("decode"), refused_by("prefill")
    return (
        tuple(x for x in decode if x in prefill), tuple(x for x in decode if x not in prefill),
        tuple(x for x in prefill if x not in decode),
    )  # fmt: skip


_BY_BOTH, _BY_DECODE, _BY_PREFILL = _refused()


def why_not_tensors(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Return the reason why the backend cannot run with tensors of this device, dtype and head
    width, or None."""
    reason: str | None = why_not_dtype(NAME, DTYPES, HEAD_WIDTHS, dtype, head_width) or _why_not_device(device)
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


def why_not_call(call: Call) -> str | None:
    """Return the reason why these kernels do not support the call, or None."""
    few = call.q.size(2) <= MAX_DECODE_QUERIES
    not_by_decode = _why_not_terms_decode(call)
    needs_hopper = not few or needs_gradients(call) or not_by_decode is not None
    reason = _why_not_formula(call)
    if reason is None and needs_hopper and (term := _why_not_terms_prefill(call)) is not None:
        reason = (not_by_decode or f"gradients with {term}") if few else term
    if reason is not None:
        return f"it does not take {reason}; backend='triton' does"
    if needs_hopper:
        reason = why_not_hopper(call)
        if reason is not None:
            what = "gradients" if not_by_decode is None else not_by_decode
            if not few:
                what = f"{call.q.size(2)} queries (L), where others take {MAX_DECODE_QUERIES}"
            return f"{reason}, as the kernels do that compute {what}; backend='triton' takes any call"
    if call.q.size(1) > MAX_HEADS:
        return f"it takes at most {MAX_HEADS} heads (H), got {call.q.size(1)}; backend='triton' takes any number"
    reason = _why_not_prefill_sizes(call) if needs_hopper else None
    return reason or (_why_not_decode_keys(call) if is_decode(call) else None)


def _why_not_prefill_sizes(call: Call) -> str | None:
    """Return the reason why a call is too large for the Hopper kernels, or None."""
    if call.q.size(0) > MAX_BATCH:
        return f"it takes at most {MAX_BATCH} batch rows (B), got {call.q.size(0)}; backend='triton' takes any number"
    keys = memory_len_of(call) + call.q.size(2)
    if keys > MAX_PREFILL_KEYS:
        return f"it takes at most {MAX_PREFILL_KEYS} keys (M + L), got {keys}; backend='triton' takes any number"
    return None


def _why_not_decode_keys(call: Call) -> str | None:
    """Return the reason why a call has too many keys for the decode kernels, or None."""
    keys = memory_len_of(call) + call.q.size(2)
    keys = keys if call.left is None else min(keys, call.left + call.q.size(2))
    if keys > MAX_DECODE_KEYS:
        return (
            f"it takes at most {MAX_DECODE_KEYS} keys (M + L, or the window), got {keys}; "
            "backend='triton' takes any number"
        )
    return None


def is_decode(call: Call) -> bool:
    """Whether forward of a call that the backend takes runs on the decode kernels."""
    length = call.q.size(2)
    if length > MAX_DECODE_QUERIES or _why_not_terms_decode(call) is not None:
        return False
    if length < MIN_HOPPER_QUERIES or _inklings_term(call) is not None:
        return True
    return (why_not_hopper(call) or _why_not_prefill_sizes(call)) is not None


def _why_not_formula(call: Call) -> str | None:
    """Return the part of the formula that the call needs and none of these kernels has, or None."""
    field = first_refused(call, _BY_BOTH)
    if field is not None:
        return field
    return None if call.v.size(3) < call.q.size(3) and call.q_pos is not None else _why_not_values(call)


def _why_not_values(call: Call) -> str | None:
    if call.v.size(3) != call.q.size(3):
        return f"values of another width than q's, got {call.v.size(3)} and {call.q.size(3)}"
    return None


def _inklings_term(call: Call) -> str | None:
    """Return the first of Inkling's terms that a call has, or None."""
    if call.q_pos is not None:
        return f"q_pos, got {list(call.q_pos.shape)}"
    if call.sink is not None:
        return f"sink, got {list(call.sink.shape)}"
    if call.k.size(1) != call.q.size(1):
        return f"grouped heads, got {call.k.size(1)} heads of k for {call.q.size(1)} of q"
    return "outside='zero'" if call.zero_outside else None


def _why_not_terms_decode(call: Call) -> str | None:
    """Return one of Inkling's terms that the call has, for which the decode kernels do not take it,
    with what they take, or None."""
    field = first_refused(call, _BY_DECODE)
    if field is not None:
        return field
    term = _inklings_term(call)
    if term is None:
        return None
    if call.q.size(2) > MAX_TERM_QUERIES:
        return f"{term}, for more than {MAX_TERM_QUERIES} queries (L), got {call.q.size(2)}"
    if (reason := _why_not_values(call)) is not None:
        return reason
    width = position_width_of(call)
    multiple_of = HEAD_WIDTHS.multiple_of
    if width > call.q.size(3) or width % multiple_of:
        return f"q_pos of other widths than multiples of {multiple_of} up to q's {call.q.size(3)}, got {width}"
    return None


def _why_not_terms_prefill(call: Call) -> str | None:
    """Return one of Inkling's terms that the call has, for which the kernels of prefill and of
    gradients do not take it, with what they take, or None. It reads no length, see
    `is_preferred`."""
    field = first_refused(call, _BY_PREFILL)
    if field is not None:
        return field
    if call.q_pos is None:
        term = _inklings_term(call)
        return None if term is None else f"{term}, without q_pos"
    width = position_width_of(call)
    if width > max(POSITION_WIDTHS):
        return f"q_pos wider (Dp) than {max(POSITION_WIDTHS)}, got {width}"
    for name, bias in (("content_bias", call.content_bias), ("position_bias", call.position_bias)):
        if bias is not None:
            return f"{name} beside q_pos"
    return None


def is_preferred(call: Call) -> bool:
    """Whether backend=None takes these kernels for the call rather than Triton's, as measured on an
    H200 (docs/kernels-gpu.md). With Inkling's terms nothing was measured: decode is chosen, whose
    first call is compared with the reference, and the Hopper kernels are not, since a comparison
    cannot end a wait for ever.

    A traced graph serves all lengths. There the answer depends on none, which would add a guard:
    True where the kernels take any.
    """
    if torch.compiler.is_compiling():
        return (_inklings_term(call) or _why_not_formula(call) or why_not_hopper(call)) is None
    if _inklings_term(call) is not None and (needs_gradients(call) or not is_decode(call)):
        return False
    return why_not_call(call) is None and (call.q.size(2) <= FASTER_UP_TO or not is_decode(call))


def takes_kind(
    device: torch.device, dtype: torch.dtype, head_width: int, decode: bool, gradients: bool, call: Call | None = None
) -> bool:
    """Whether the kernels take calls of a kind, with or without gradients, whose tensors they can
    read. call: one of the kind, for Inkling's terms; None for the paper's formula."""
    if decode and not gradients:
        return True
    if call is not None and _why_not_terms_prefill(call) is not None:
        return False
    return _why_not_hopper_gpu(device) is None and dtype in HOPPER_DTYPES and head_width <= HOPPER_WIDTH


def why_not_hopper(call: Call) -> str | None:
    """Return the reason why the kernels of prefill and of gradients do not support a call, or
    None."""
    reason: str | None = _why_not_hopper_gpu(call.q.device)
    if reason is not None:
        return reason
    if call.q.dtype not in HOPPER_DTYPES:
        return f"it needs bfloat16 or float16, not {str(call.q.dtype).removeprefix('torch.')}"
    if call.q.size(3) > HOPPER_WIDTH:
        return f"it needs a head width (D) of at most {HOPPER_WIDTH}, not {call.q.size(3)}"
    copied = _narrow(call)
    for name, x in zip(INPUTS, inputs_of(call), strict=True):
        if x is not None and name != "sink" and name not in copied and not _rows_apart(x):
            return f"it needs rows of {name} apart, at multiples of {ROW_BYTES} bytes, not strides {x.stride()}"
    return None


def _narrow(call: Call) -> dict[str, int]:
    """Return the widths at which the Hopper kernels take those inputs whose rows are narrower, by
    name: rows of positions and, beside `q_pos`, of values. Zeros are put behind them."""
    widths: dict[str, int] = {}
    if call.q_pos is None:
        return widths
    width, value_width = position_width_of(call), call.q.size(3)
    if width not in POSITION_WIDTHS and width < max(POSITION_WIDTHS):
        widths["q_pos"] = widths["r"] = min(x for x in POSITION_WIDTHS if x > width)
    if call.v.size(3) < value_width:
        widths["v"] = widths["v_mem"] = value_width
    return widths


def _widened(call: Call) -> Call:
    """Return the call with copies of the inputs of `_narrow`, or the call itself."""
    widths = _narrow(call)
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


def _rows_apart(x: Tensor) -> bool:
    """Whether every row begins at an address that TMA can read, and after the end of the row
    before."""
    item = x.element_size()
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1 and step]
    is_repeated = x.dim() > 1 and x.size(-2) > 1 and x.stride(-2) == 0
    if is_repeated or any(step < x.size(-1) for step in steps):
        return False
    return all(place % ROW_BYTES == 0 for place in (_address(x), *(step * item for step in steps)))


def _address(x: Tensor) -> int:
    """Return the address of a tensor, or 0 for tensors without one, which torch traces or
    transforms. The module checks addresses again at every call."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # a tensor in a transform's wrapper
        return 0


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
        reason = why_not_hopper(call)
        if (term := _why_not_terms_prefill(call)) is not None:
            reason = f"the kernels do not take {term}"
        if reason is not None:
            raise RuntimeError(f"backend={NAME!r} cannot compute gradients: {reason}; backend='triton' can")
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
    if not ((dout.is_contiguous() and dout.data_ptr() % ROW_BYTES == 0) or _rows_apart(dout)):
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
        call, out, DTYPES.index(call.q.dtype), _drop_below(call), multiprocessors, _index(call)
    )


def prefill_plan(call: Call, out: Tensor, multiprocessors: int) -> Any:
    """Return the plan of prefill, or of backward for any number of queries."""
    return native.module.PrefillPlan(
        call, out, DTYPES.index(call.q.dtype), _drop_below(call), multiprocessors, _index(call)
    )


def _index(call: Call) -> int:
    """Return the GPU's index; -1 for torch's current device."""
    return -1 if call.q.device.index is None else call.q.device.index


def _drop_below(call: Call) -> int:
    return drop_threshold(call.dropout_p) if call.seed is not None else 0


@constant_when_traced
def _why_not_hopper_gpu(device: torch.device) -> str | None:
    found = architecture(device)
    if found == HOPPER:
        return None
    this = found if isinstance(found, str) else f"{found[0]}.{found[1]}"
    return f"it needs a GPU of compute capability {HOPPER[0]}.{HOPPER[1]}, this is {this}"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _stream(device: torch.device) -> int:
    """Return the handle of torch's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))
