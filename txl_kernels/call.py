"""The fields of a call of `rel_attention`, the keys that its queries see, and the weights that
dropout drops."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """The checked arguments that every backend receives. Shapes are those of `rel_attention`.

    The operators' schema is generated from the order of the fields. `csrc/python/call.h` repeats
    it, and a compiled module with another order is not loaded.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor | None
    content_bias: Tensor | None  # [H, D]; None for zeros
    position_bias: Tensor | None  # [H, Dp]; None for zeros
    k_mem: Tensor | None
    v_mem: Tensor | None
    r_bias: Tensor | None  # [H, T], any strides; at least one of r and r_bias is given
    q_pos: Tensor | None  # [B, H, L, Dp], the queries of r; None for q (then position_scale == scale beside r)
    sink: Tensor | None  # [B, H, L], any strides, float32 (float64 beside float64)
    start: Tensor | None  # int32 [B, L]
    end: Tensor | None  # int32 [B, L]
    seed: Tensor | None  # int64 [1]; present if dropout_p > 0
    left: int | None  # keys seen before a query's own; None for all
    right: int | None  # keys seen after it; None for all
    zero_row: int
    scale: float
    dropout_p: float
    softcap: float  # 0.0 for none
    position_scale: float  # the factor of the terms of r and r_bias
    zero_outside: bool  # True if pairs at distances without a row of r and r_bias have no such terms


INPUTS = Call._fields[: Call._fields.index("start")]
BOUNDS = ("start", "end")
TENSORS = (*INPUTS, *BOUNDS, "seed")
SETTINGS = Call._fields[len(TENSORS) :]
OPTIONS = tuple(name for name in SETTINGS if name not in ("left", "right", "zero_row", "scale"))  # see `is_given`
Wanted = Sequence[bool]  # for each of INPUTS, whether its gradient is needed
ALL: Wanted = (True,) * len(INPUTS)


class Input(NamedTuple):
    """The properties of one of INPUTS, from which checks, casts of autocast, splits by batch rows
    and the cases of the self-check follow.

    Attributes:
        axes: letters of the axes, as in `rel_attention`. Letters of the same size are the same.
        dtype: "q" for q's; "lse" for float32, beside float64 float64.
        is_term: True for a tensor that adds a term to the formula and may be absent.
        any_strides: True if the last axis need not be contiguous.
    """

    axes: str
    dtype: str = "q"
    is_term: bool = False
    any_strides: bool = False


# In the order in which shapes are checked.
INPUT: dict[str, Input] = {
    "q": Input("B H L D"),
    "k": Input("B Hkv L D"),
    "v": Input("B Hkv L Dv"),
    "k_mem": Input("B Hkv M D"),
    "v_mem": Input("B Hkv M Dv"),
    "q_pos": Input("B H L Dp", is_term=True),
    "sink": Input("B H L", "lse", is_term=True, any_strides=True),
    "content_bias": Input("H D"),
    "position_bias": Input("H Dp"),
    "r": Input("H T Dp", is_term=True),
    "r_bias": Input("H T", is_term=True, any_strides=True),
}
# The kernels that take a field: "native", "triton", "decode" and "prefill" of the backend "cuda",
# and "onnx", the operator of ONNX Runtime. Other kernels refuse a call that gives the field, as all
# do with a field that is not here. The reference takes every field.
TAKEN_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "q_pos", "sink", "start", "end", "left",
         "right", "zero_row", "scale", "position_scale", "zero_outside"),
        ("native", "triton", "decode", "prefill", "onnx"),
    ),
    **dict.fromkeys(("r_bias", "softcap"), ("native", "triton", "onnx")),
    **dict.fromkeys(("dropout_p", "seed"), ("native", "triton", "decode", "prefill")),
}  # fmt: skip
# The version of the C structs, which grow at the end, that first had a field; 1 if it is not here.
SINCE: dict[str, int] = {}
TERMS = tuple(name for name in INPUTS if INPUT[name].is_term)


Fields = tuple[tuple[str, int], ...]  # names and numbers of fields


def refused_by(kernels: str) -> Fields:
    """Return the fields that kernels do not take, the last of `Call` first."""
    return tuple((name, n) for n, name in reversed([*enumerate(Call._fields)]) if kernels not in TAKEN_BY.get(name, ()))


def first_refused(call: "Call", refused: Fields) -> str | None:
    """Return the name of the first of these fields that a call gives, with its value if it is no
    tensor; None if it gives none."""
    for name, n in refused:
        if is_given(call, name, n):
            value = call[n]
            return f"{name}, got {value}" if isinstance(value, (int, float)) else name
    return None


def is_given(call: "Call", name: str, n: int) -> bool:
    """Whether a call gives the field of this name and number: it is neither None, False nor 0;
    `position_scale` differs from `scale` without `q_pos`."""
    value = call[n]
    if value is None or not isinstance(value, (int, float)):
        return value is not None
    return call.q_pos is None and value != call.scale if name == "position_scale" else value != 0


# These are functions, not properties or `_replace`, and they slice plain tuples, because
# torch.compile of torch 2.6 cannot trace those of named tuples.
def changed(call: Call, **fields: Any) -> Call:
    """Return the call with other values in some fields."""
    return Call(**{**dict(zip(Call._fields, call, strict=True)), **fields})


def position_width_of(call: Call) -> int:
    """Return Dp, the width of the rows of r and of `position_bias`: D without `q_pos`."""
    return call.q.size(3) if call.q_pos is None else call.q_pos.size(3)


def memory_len_of(call: Call) -> int:
    return 0 if call.k_mem is None else call.k_mem.size(2)


def table_len_of(call: Call) -> int:
    """Return T, the number of rows of r or of `r_bias`."""
    if call.r is not None:
        return call.r.size(1)
    return 0 if call.r_bias is None else call.r_bias.size(1)


def inputs_of(call: Call) -> tuple[Tensor | None, ...]:
    """Return the tensors that have gradients, in the order of INPUTS."""
    return tuple(call)[: len(INPUTS)]  # type: ignore[return-value]


def tensors_of(call: Call) -> tuple[Tensor | None, ...]:
    """Return inputs, bounds and seed, in the order of TENSORS."""
    return tuple(call)[: len(TENSORS)]  # type: ignore[return-value]


def settings_of(call: Call) -> tuple[Any, ...]:
    """Return the fields that are not tensors, in the order of SETTINGS."""
    return tuple(call)[len(TENSORS) :]


def is_bounded(call: Call) -> bool:
    """Whether `start` or `end` is given."""
    return call.start is not None or call.end is not None


def needs_gradients(call: Call) -> bool:
    if torch.is_grad_enabled():
        for x in inputs_of(call):
            if x is not None and x.requires_grad:
                return True
    return False


def empty_like_rows(x: Tensor) -> Tensor:
    """Return an uninitialised tensor of x's shape and dtype. It has x's strides if these leave the
    last axis contiguous."""
    y = torch.empty_like(x)
    # empty_like chooses other strides for a tensor that overlaps itself (expanded, unfolded).
    return y if y.stride(-1) == 1 or y.shape[-1] <= 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialised tensor [B, H, L, D of v]. It has the strides of q, or of v where q
    has another width; where v has another number of heads, too, it is contiguous."""
    if q.size(3) == v.size(3):
        return empty_like_rows(q)
    return empty_like_rows(v) if v.size(1) == q.size(1) else q.new_empty((*q.shape[:3], v.size(3)))


def empty_gradients(call: Call, wanted: Wanted = ALL) -> tuple[Tensor | None, ...]:
    """Return uninitialised gradients of the call's inputs; None where there is no input or its
    gradient is not wanted."""
    inputs = inputs_of(call)
    return tuple(
        [None if x is None or not want else empty_like_rows(x) for x, want in zip(inputs, wanted, strict=True)]
    )


# Visible keys: each query sees one interval of keys. Query i stands at key position p_i = M + i;
# key j is at distance d = p_i - j. A query sees the keys low <= j < high, the intersection of
# `left`, `right`, `start` and `end`.


def intervals(call: Call) -> tuple[Tensor, Tensor]:
    """Return (low, high), the first and one-past-last visible key of each query, both int64 [B or
    1, L], within [0, S]. A query with low >= high sees no key."""
    memory_len, length = memory_len_of(call), call.q.size(2)
    keys = memory_len + length
    at = torch.arange(memory_len, keys, device=call.q.device).unsqueeze(0)
    low = torch.zeros_like(at) if call.left is None else (at - call.left).clamp(min=0)
    high = torch.full_like(at, keys) if call.right is None else (at + call.right + 1).clamp(max=keys)
    if call.start is not None:
        low = torch.maximum(low, call.start.long())
    if call.end is not None:
        high = torch.minimum(high, call.end.long())
    return low, high


def seen_by_any(call: Call) -> Tensor:
    """Return the keys that at least one query sees, bool [B or 1, S]."""
    low: Tensor
    high: Tensor
    low, high = torch.broadcast_tensors(*intervals(call))  # one of them may hold for all batch rows
    keys = memory_len_of(call) + call.q.size(2)
    counts = (low < high).to(torch.int32)  # +1 where an interval begins, -1 one past its end
    steps = counts.new_zeros(low.size(0), keys + 1)
    steps = steps.scatter_add(1, low.clamp(0, keys), counts).scatter_add(1, high.clamp(0, keys), -counts)
    return steps.cumsum(1)[:, :-1] > 0


def distance_range(call: Call) -> tuple[int, int]:
    """Return the smallest and largest distance that `left` and `right` leave visible to any query;
    (0, -1) if there are no queries."""
    length = call.q.size(2)
    keys = memory_len_of(call) + length
    if length == 0:
        return 0, -1
    farthest = keys - 1 if call.left is None else min(keys - 1, call.left)
    right = length - 1 if call.right is None else min(call.right, length - 1)
    return -right, farthest


# Dropout bits: Philox-4x32-7 (Salmon et al. 2011), a function of seed and (b, h, i, j) alone. Entry
# (b, h, i, j) uses the i % 8-th 16 bits, lowest first, of the block with counter (j, i // 8, b * H
# + h, 0) under the 64-bit key `seed`, and is dropped if they are below `drop_threshold`. Every
# backend uses the same bits. Eight neighbouring queries share a block because tiles of queries
# begin at multiples of eight, while the offset of tiles of keys depends on the memory's length.
# Seven rounds are the fewest that pass BigCrush (there, table 2).
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7


def drop_threshold(dropout_p: float) -> int:
    """Return the integer t such that 16 bits below t drop an entry: 65536 p, rounded, 1 to 65535; 0
    if p is 0."""
    return min(max(round(dropout_p * 2**16), 1), 2**16 - 1) if dropout_p else 0


def keep_scale(dropout_p: float) -> float:
    """Return the factor of weights that are kept, 1 / (1 - p), where p is `drop_threshold` /
    65536."""
    return 2**16 / (2**16 - drop_threshold(dropout_p))


def _high_low(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # The 64-bit product of 32-bit values would overflow int64: split x into 16-bit halves.
    low, high = (x & 0xFFFF) * multiplier, (x >> 16) * multiplier
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four words for each counter. All tensors are int64, hold 32-bit values and are
    broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(c0, _MULTIPLIERS[0])
        high1, low1 = _high_low(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, batch: int, heads: int, length: int, keys: int, dropout_p: float) -> Tensor:
    """Return the mask of entries that are kept, bool [batch, heads, length, keys]. seed: int64, one
    element."""
    device = seed.device
    bh = torch.arange(batch * heads, device=device).view(-1, 1, 1)
    group = torch.arange((length + 7) // 8, device=device).view(1, -1, 1)
    j = torch.arange(keys, device=device).view(1, 1, -1)
    seed = seed.reshape(())
    words = philox((j, group, bh, torch.zeros_like(j)), (seed & _MASK, (seed >> 32) & _MASK))
    halves = [half for word in torch.broadcast_tensors(*words) for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(halves, dim=2).flatten(1, 2)[:, :length]
    return (bits >= drop_threshold(dropout_p)).view(batch, heads, length, keys)
