"""Variants of the attention that the kernels do not have, composed of plain calls.

`attend` rewrites a call in steps. Each step takes a call and returns one without one of the
variants, until a plain call is left. So every backend computes all variants exactly, and the
kernels compute one formula.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from txl_kernels.backends.reference import share_beside, softmax
from txl_kernels.call import INPUT, INPUTS, Call, changed, inputs_of, memory_len_of, table_len_of
from txl_kernels.checks import DROPOUT_P, ZERO_ROW, check_integer, check_number, check_seed, with_bounds
from txl_kernels.seed import seeded

Chunk = tuple[int, int | None] | None
_BATCHED = tuple(name for name, x in INPUT.items() if x.axes.startswith("B "))
Attend = Callable[[Call], tuple[Tensor, Tensor]]


def attend(
    call: Call, plain: Attend, chunk: Chunk, prefix: int, r_descending: bool, clamp: bool
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call with any variant, whose tensors have been checked
    (`prepare.check_special`).

    plain: computes a plain call.
    clamp: True for outside="clamp". The other arguments are those of `rel_attention`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    if call.seed is not None:
        check_seed(call.seed, call.q)
    if type(call.dropout_p) is not float or call.dropout_p:  # the seed of both calls of a prefix is drawn by it
        check_number("dropout_p", call.dropout_p, 0.0, 1.0, DROPOUT_P)
    keys = memory_len_of(call) + call.q.size(2)
    if type(prefix) is not int or not 0 <= prefix <= keys:
        _check_prefix(prefix, keys)
    if chunk is not None or call.start is not None or call.end is not None:
        call = without_chunk(call, chunk)
    if not isinstance(r_descending, bool):
        raise TypeError(f"r_descending must be True or False, got {type(r_descending).__name__}")
    if r_descending:
        call = _ascending(call)
    if clamp:
        call = _clamped(call, prefix)
    if call.r_bias is not None:
        call = changed(call, r_bias=of_all_heads(call.r_bias, call.q.size(1)))
    if call.r is not None and call.r.dim() == 4:
        return _each_batch_row(call, call.r, prefix, keys, plain)
    return _one_table(call, prefix, keys, plain)


def of_all_heads(table: Any, heads: int) -> Any:
    """Return r [1, T, D] or `r_bias` [1, T] as a view with a table for each head; any other value
    unchanged."""
    shared = isinstance(table, Tensor) and not table.is_nested and table.dim() in (2, 3) and table.size(0) == 1
    return table.expand(heads, *table.shape[1:]) if shared else table


def _each_batch_row(call: Call, r: Tensor, prefix: int, keys: int, plain: Attend) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of one plain call for each batch row b, with its table r[b] and, for
    dropout, seed + b."""
    batch = call.q.size(0)
    tables = r.expand(batch, -1, -1, -1)
    if batch == 0:  # one call without batch rows, whose results have gradients
        return _one_table(changed(call, r=tables.sum(0)), prefix, keys, plain)
    inputs = dict(zip(INPUTS, inputs_of(call), strict=True))
    batched = {name: x for name, x in inputs.items() if name in _BATCHED and x is not None}
    parts = [
        _one_table(
            changed(
                call,
                **{name: x[b : b + 1] for name, x in batched.items()},
                r=tables[b],
                start=_of_row(call.start, b),
                end=_of_row(call.end, b),
                seed=None if call.seed is None else call.seed + b,
            ),
            prefix,
            keys,
            plain,
        )
        for b in range(batch)
    ]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def _of_row(bound: Tensor | None, b: int) -> Tensor | None:
    """Return the bounds of batch row b, [1, L], of bounds [B or 1, L]."""
    return bound if bound is None or bound.size(0) == 1 else bound[b : b + 1]


# Chunked streaming encoders: a query sees its own chunk and chunks before it.


def check_chunk(chunk: Any, causal: Any) -> Chunk:
    """Return `chunk` as a pair (size, left), or None.

    Raises:
        TypeError, ValueError: chunk is not such a pair, or the attention is causal.
    """
    if chunk is None:
        return None
    if not isinstance(chunk, (tuple, list)) or len(chunk) != 2:
        got = type(chunk).__name__ if isinstance(chunk, Tensor) else repr(chunk)
        raise TypeError(f"chunk must be None or a pair (size, left), got {got}")
    size, left = chunk
    check_integer("chunk[0]", size, 1, "an integer >= 1 (queries of a chunk)")
    if left is not None:
        check_integer("chunk[1]", left, 0, "None or an integer >= 0 (chunks seen before a query's own)")
    if causal is not False:
        raise ValueError("chunk needs causal=False: a query sees its chunk ahead of itself, too; got causal=True")
    return size, left


def without_chunk(call: Call, chunk: Chunk) -> Call:
    """Return the call with its chunks expressed by `start` and `end`, int32 [B or 1, L], both
    within [0, M + L].

    Raises:
        TypeError, ValueError: `start` or `end` is wrong.
    """
    call = with_bounds(call)
    given_start, given_end = call.start, call.end
    if chunk is None:
        return call
    size, left = chunk
    length, memory_len = call.q.size(2), memory_len_of(call)
    own = torch.arange(length, device=call.q.device, dtype=torch.int32) // size
    end = (memory_len + (own + 1) * size).clamp(max=memory_len + length).unsqueeze(0)
    if given_end is not None:
        end = torch.where(given_end > memory_len + length, given_end, torch.minimum(end, given_end))
    start = given_start
    if left is not None:
        start = (memory_len + (own - left) * size).clamp(min=0).unsqueeze(0)
        if given_start is not None:  # values out of range stay out of range, and raise later
            start = torch.where(given_start < 0, given_start, torch.maximum(start, given_start))
    return changed(call, start=start, end=end)


# Tables in descending order, and tables with too few rows.


def _ascending(call: Call) -> Call:
    """Return the call with r and `r_bias` copied in ascending order: row `zero_row + d` holds
    distance d.

    Raises:
        TypeError, ValueError: `zero_row` is wrong.
    """
    rows = _rows(call, "r_descending=True")
    r = None if call.r is None else call.r.flip(-2)
    r_bias = None if call.r_bias is None else call.r_bias.flip(-1)
    return changed(call, r=r, r_bias=r_bias, zero_row=rows - 1 - call.zero_row)


def _rows(call: Call, setting: str) -> int:
    """Return the number of rows of r (or `r_bias`), after a check that `zero_row` is one of them.

    setting: the option that needs this, for the error.

    Raises:
        TypeError, ValueError: `zero_row` is not a row, or the table has no rows.
    """
    rows = table_len_of(call) if call.r is None else call.r.size(-2)
    check_integer("zero_row", call.zero_row, 0, ZERO_ROW)
    table = "r_bias" if call.r is None else "r"
    if rows == 0:
        raise ValueError(f"{table} must have a row where {setting}, got none")
    if call.zero_row >= rows:
        raise ValueError(f"zero_row must be a row of {table} (0 to {rows - 1}) where {setting}, got {call.zero_row}")
    return rows


def _clamped(call: Call, prefix: int) -> Call:
    """Return the call with the first and last rows of r and `r_bias` repeated for every distance
    that the settings leave visible."""
    rows, length = _rows(call, "outside='clamp'"), call.q.size(2)
    keys = memory_len_of(call) + length
    # A query sees a prefix at any distance.
    left, right = (None, None) if prefix else (call.left, call.right)
    if torch.compiler.is_compiling():  # one graph serves all lengths; an exact count would add a guard for each
        before, after = length if right is None else right, keys if left is None else left + 1
    else:
        past = keys - 1 if left is None else min(keys - 1, left)
        future = length - 1 if right is None else min(right, length - 1)
        before, after = max(future - call.zero_row, 0), max(call.zero_row + past + 1 - rows, 0)
    r = None if call.r is None else _extended(call.r, before, after)
    r_bias = None if call.r_bias is None else _extended(call.r_bias.unsqueeze(-1), before, after).squeeze(-1)
    return changed(call, r=r, r_bias=r_bias, zero_row=call.zero_row + before)


def _extended(x: Tensor, before: int, after: int) -> Tensor:
    """Return x [.., T, D] with its first and last rows repeated. Gradients of the repeated rows are
    summed in a fixed order."""
    if before == 0 and after == 0:
        return x
    first, last = x[..., :1, :], x[..., -1:, :]
    shape = x.shape[:-2]
    return torch.cat([first.expand(*shape, before, -1), x, last.expand(*shape, after, -1)], -2)


# A prefix gives a query two intervals of keys. Each is a call; `merged` combines them.


def _check_prefix(prefix: Any, keys: int) -> None:
    check_integer("prefix", prefix, 0, "an integer from 0 to M + L")  # an f-string would specialize a symbolic size
    if prefix > keys:
        raise ValueError(f"prefix must be an integer from 0 to M + L = {keys}, got {prefix}")


def _one_table(call: Call, prefix: int, keys: int, plain: Attend) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call whose batch rows share their table. With a prefix it is one plain
    call where every interval begins at key 0, as in causal attention, else two.

    keys: M + L.
    """
    if call.r is not None and call.r.size(0) != call.q.size(1):
        call = changed(call, r=of_all_heads(call.r, call.q.size(1)))
    if not prefix:
        return plain(call)
    low, high, valid = _interval(call, keys)
    if call.dropout_p:
        call = seeded(call)  # both calls use one seed
    if low is None:
        end = torch.where(valid, high.clamp(min=prefix), high)
        return plain(changed(call, left=None, right=None, start=None, end=end))
    call = changed(call, left=None, right=None)
    joined = (low <= prefix) | (low >= high)  # the prefix and the interval are one interval from key 0
    first = torch.where(joined & valid, 0, low)
    last = torch.where(joined & valid, torch.where(low < high, high, 0).clamp(min=prefix), high)
    none = torch.zeros_like(low)
    sink, call = call.sink, changed(call, sink=None)  # of both calls together
    out, lse = merged(
        [
            plain(changed(call, start=first, end=last)),
            plain(changed(call, start=none, end=torch.where(joined, none, prefix))),
        ]
    )
    return out if sink is None else (out * share_beside(sink, lse).unsqueeze(-1)).to(out.dtype), lse


def _interval(call: Call, keys: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (low, high, valid): the first and one-past-last of the M + L keys that settings and
    bounds let each query see, int32 [B or 1, L] (low is None if it is 0 for all), and whether the
    bounds are in range, bool."""
    at = torch.arange(keys - call.q.size(2), keys, device=call.q.device, dtype=torch.int32).unsqueeze(0)
    high = torch.full_like(at, keys) if call.right is None else (at + min(call.right, keys) + 1).clamp(max=keys)
    low = None if call.left is None else (at - min(call.left, keys)).clamp(min=0)
    valid = torch.ones_like(at, dtype=torch.bool)
    if call.start is not None:
        valid = valid & (call.start >= 0) & (call.start <= keys)
        low = call.start if low is None else torch.where(valid, torch.maximum(low, call.start), call.start)
    if call.end is not None:
        in_range = (call.end >= 0) & (call.end <= keys)
        high = torch.where(in_range, torch.minimum(high, call.end), call.end)
        valid = valid & in_range
    if low is not None:
        low, high, valid = torch.broadcast_tensors(low, high, valid)
    return low, high, valid


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over the union of disjoint ranges of keys, of (out, lse) over each range.

    Each range's out is weighted by its share of the softmax's denominator. The shares sum to 1;
    their precision is that of lse in its dtype.
    """
    sums = torch.stack([lse for _, lse in parts])
    # If all ranges' lse are -inf, the difference is NaN, and so is its gradient: replace them by 0.
    nothing = torch.isneginf(sums).all(0)
    sums = sums.masked_fill(nothing, 0.0)
    shares, lse = softmax(sums, 0)
    shares = shares.unsqueeze(-1)
    out = parts[0][0] * shares[0]
    for (x, _), share in zip(parts[1:], shares[1:], strict=True):
        out = out + x * share
    return out.to(parts[0][0].dtype), lse.masked_fill(nothing, -torch.inf)
