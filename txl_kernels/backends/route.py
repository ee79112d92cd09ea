"""The decision whether kernels take a call, and which of the backend "cuda" compute it: comparisons
of the call with `limits` and with the table of fields."""

from typing import NamedTuple

import torch
from torch import Tensor

from txl_kernels.backends.limits import DECODE, DECODE_QUERIES, NATIVE, PREFILL, REFERENCE, TRITON, Limits
from txl_kernels.backends.protocol import architecture
from txl_kernels.call import (
    INPUTS,
    Call,
    Fields,
    first_refused,
    inputs_of,
    memory_len_of,
    needs_gradients,
    position_width_of,
    refused_by,
)
from txl_kernels.torch_state import constant_when_traced

# The smallest number of queries for which the Hopper kernels run where both of "cuda" could: the
# decode kernels are faster for one query alone (H100).
MIN_PREFILL_QUERIES = 2
# The largest number of queries for which backend=None chooses the decode kernels: their calls take
# 0.15 ms less of the host's time than Triton's (H200). On the device Triton's take less from 2
# queries on, and for 64 batch rows from one.
FASTER_UP_TO = 4
_OF_BACKEND = {x.kernels: x for x in (NATIVE, TRITON, REFERENCE)}
_OTHER_WIDTH = "values of another width than q's, got {} and {}"


def _refused() -> dict[str, Fields]:
    """Return the fields that kernels do not take, by the kernels' name."""
    return {REFERENCE.kernels: (), **{x.kernels: refused_by(x.kernels) for x in (NATIVE, TRITON, DECODE, PREFILL)}}


_REFUSED = _refused()


class Reason(NamedTuple):
    """The reason why kernels do not take a call.

    Attributes:
        text: what they do not take, or, about tensors and sizes, what they need.
        about: "formula", "tensors" (device, dtype, width, strides) or "sizes".
    """

    text: str
    about: str


def why_not(call: Call, limits: Limits, sizes: bool = True) -> Reason | None:
    """Return the first reason why kernels do not take a call, or None; whether they run on q's
    device is asked for compute capabilities alone.

    sizes: False to compare no number of heads, batch rows or keys.
    """
    missing = _missing(call, limits)
    if missing is not None:
        return Reason(missing, "formula")
    q, found = call.q, None
    if limits.capability is not None:
        found = _why_not_capability(q.device, limits.capability)
    if found is None and limits.dtypes and q.dtype not in limits.dtypes:
        *others, last = [str(x).removeprefix("torch.") for x in limits.dtypes]
        found = f"it needs {', '.join(others)} or {last}, not {str(q.dtype).removeprefix('torch.')}"
    if found is None and limits.width is not None and q.size(3) > limits.width:
        found = f"it needs a head width (D) of at most {limits.width}, not {q.size(3)}"
    if found is None and limits.row_bytes > 1:
        copied = padded_widths(call)
        for name, x in zip(INPUTS, inputs_of(call), strict=True):
            if x is not None and name != "sink" and name not in copied and not rows_apart(x, limits.row_bytes):
                found = (
                    f"it needs rows of {name} apart, at multiples of {limits.row_bytes} bytes, not strides {x.stride()}"
                )
                break
    if found is not None:
        return Reason(found, "tensors")
    if sizes:
        keys = memory_len_of(call) + q.size(2)
        if limits.keys_of_window and call.left is not None:
            keys = min(keys, call.left + q.size(2))
        counted = "keys (M + L, or the window)" if limits.keys_of_window else "keys (M + L)"
        for limit, size, what in (
            (limits.heads, q.size(1), "heads (H)"), (limits.batch, q.size(0), "batch rows (B)"),
            (limits.keys, keys, counted),
        ):  # fmt: skip
            if limit is not None and size > limit:
                return Reason(f"it takes at most {limit} {what}, got {size}", "sizes")
    return None


def _missing(call: Call, limits: Limits) -> str | None:
    """Return the part of the formula that a call needs and kernels do not have, or None. It reads
    no length but where `term_queries` is a limit."""
    field = first_refused(call, _REFUSED[limits.kernels])
    if field is not None:
        return field
    width, value_width, position_width = call.q.size(3), call.v.size(3), position_width_of(call)
    is_other = limits.value_width == 0 and value_width != width
    if is_other and not (call.q_pos is not None and value_width < width):
        return _OTHER_WIDTH.format(value_width, width)
    if limits.value_width and value_width > limits.value_width:
        return f"values wider than {limits.value_width}, got {value_width}"
    has_limit = limits.term_queries is not None or limits.terms_need_q_pos
    term = inklings_term(call) if has_limit else None
    if limits.term_queries is not None and term is not None:
        if call.q.size(2) > limits.term_queries:
            return f"{term}, for more than {limits.term_queries} queries (L), got {call.q.size(2)}"
        if is_other:
            return _OTHER_WIDTH.format(value_width, width)
        if position_width > width or position_width % limits.multiple_of:
            return (
                f"q_pos of other widths than multiples of {limits.multiple_of} up to q's {width}, got {position_width}"
            )
    if call.q_pos is None:
        if limits.terms_need_q_pos and term is not None:
            return f"{term}, without q_pos"
    elif limits.position_width is not None and position_width > limits.position_width:
        return f"q_pos wider (Dp) than {limits.position_width}, got {position_width}"
    elif not limits.biases_beside_q_pos:
        for name, bias in (("content_bias", call.content_bias), ("position_bias", call.position_bias)):
            if bias is not None:
                return f"{name} beside q_pos"
    factor = limits.position_scale
    if factor is not None and call.scale != 0.0 and abs(call.position_scale) > factor * abs(call.scale):
        return f"position_scale beyond {factor:g} times scale, got {call.position_scale} and {call.scale}"
    return None


def why_not_call(backend: str, call: Call) -> str | None:
    """Return the reason why a backend that takes q's device, dtype and head width does not take a
    call, or None."""
    if backend != "cuda":
        reason = why_not(call, _OF_BACKEND[backend])
        if reason is None or reason.about != "formula":
            return None if reason is None else reason.text
        return f"{backend} does not take {reason.text}"
    few = call.q.size(2) <= DECODE_QUERIES
    by_decode = why_not(call, DECODE)
    missing = by_decode.text if by_decode is not None and by_decode.about == "formula" else None
    if few and missing is None and not needs_gradients(call):
        reason = by_decode if is_decode(call) else None
    else:
        reason = why_not(call, PREFILL)
    if reason is None:
        return None
    if reason.about == "sizes":
        return f"{reason.text}; backend='triton' takes any number"
    if reason.about == "formula":
        text = (missing or f"gradients with {reason.text}") if few else reason.text
        return f"it does not take {text}; backend='triton' does"
    what = missing or "gradients"
    if not few:
        what = f"{call.q.size(2)} queries (L), where others take {DECODE_QUERIES}"
    return f"{reason.text}, as the kernels do that compute {what}; backend='triton' takes any call"


def is_decode(call: Call) -> bool:
    """Whether forward of a call that "cuda" takes runs on its decode kernels."""
    length = call.q.size(2)
    if length > DECODE_QUERIES or _missing(call, DECODE) is not None:
        return False
    if length < MIN_PREFILL_QUERIES or inklings_term(call) is not None:
        return True
    return why_not(call, PREFILL) is not None


def is_preferred(call: Call) -> bool:
    """Whether backend=None takes "cuda" for a call rather than Triton's kernels, as measured on an
    H200 (docs/kernels-gpu.md). With Inkling's terms nothing was measured: decode is chosen, whose
    first call is compared with the reference, and the Hopper kernels are not, since a comparison
    cannot end a wait for ever.

    A traced graph serves all lengths. There the answer depends on none, which would add a guard:
    True where the kernels of prefill take any.
    """
    has_term = inklings_term(call) is not None
    if torch.compiler.is_compiling():
        return not has_term and why_not(call, PREFILL, sizes=False) is None
    decode = is_decode(call)
    if has_term and (needs_gradients(call) or not decode):
        return False
    return (not decode or call.q.size(2) <= FASTER_UP_TO) and why_not_call("cuda", call) is None


def inklings_term(call: Call) -> str | None:
    """Return the first of Inkling's terms that a call has, or None."""
    if call.q_pos is not None:
        return f"q_pos, got {list(call.q_pos.shape)}"
    if call.sink is not None:
        return f"sink, got {list(call.sink.shape)}"
    if call.k.size(1) != call.q.size(1):
        return f"grouped heads, got {call.k.size(1)} heads of k for {call.q.size(1)} of q"
    return "outside='zero'" if call.zero_outside else None


def padded_widths(call: Call) -> dict[str, int]:
    """Return the widths at which the kernels of prefill take those inputs whose rows are narrower,
    by name: rows of positions and, beside `q_pos`, of values. Zeros are put behind them."""
    widths: dict[str, int] = {}
    if call.q_pos is None:
        return widths
    width, value_width = position_width_of(call), call.q.size(3)
    if width not in PREFILL.position_widths and width < max(PREFILL.position_widths):
        widths["q_pos"] = widths["r"] = min(x for x in PREFILL.position_widths if x > width)
    if call.v.size(3) < value_width:
        widths["v"] = widths["v_mem"] = value_width
    return widths


def rows_apart(x: Tensor, row_bytes: int) -> bool:
    """Whether every row begins at a multiple of `row_bytes`, after the end of the row before."""
    item = x.element_size()
    steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1 and step]
    is_repeated = x.dim() > 1 and x.size(-2) > 1 and x.stride(-2) == 0
    if is_repeated or any(step < x.size(-1) for step in steps):
        return False
    return all(place % row_bytes == 0 for place in (_address(x), *(step * item for step in steps)))


def _address(x: Tensor) -> int:
    """Return the address of a tensor, or 0 for tensors without one, which torch traces or
    transforms. The module checks addresses again at every call."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # a tensor in a transform's wrapper
        return 0


@constant_when_traced
def _why_not_capability(device: torch.device, capability: tuple[int, int]) -> str | None:
    found = architecture(device)
    if found == capability:
        return None
    this = found if isinstance(found, str) else f"{found[0]}.{found[1]}"
    return f"it needs a GPU of compute capability {capability[0]}.{capability[1]}, this is {this}"
