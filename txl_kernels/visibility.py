"""Which keys a query sees: one interval a query, and the distances those intervals reach.

Query i stands at key position p_i = M + i; key j is at distance d = p_i - j. A query sees the keys
low <= j < high, the intersection of `causal`, `window`, `start` and `end`.
"""

import torch
from torch import Tensor

from txl_kernels.call import Call


def intervals(call: Call) -> tuple[Tensor, Tensor]:
    """First and one-past-last visible key of each query, both int64 [B or 1, L], within [0, S]; low >= high: none."""
    memory_len, length = call.memory_len, call.q.size(2)
    keys = memory_len + length
    at = torch.arange(memory_len, keys, device=call.q.device).unsqueeze(0)
    low = torch.zeros_like(at) if call.window is None else (at - call.window + 1).clamp(min=0)
    high = at + 1 if call.causal else torch.full_like(at, keys)
    if call.start is not None:
        low = torch.maximum(low, call.start.long())
    if call.end is not None:
        high = torch.minimum(high, call.end.long())
    return low, high


def distance_range(call: Call) -> tuple[int, int]:
    """Smallest and largest distance that `causal` and `window` let any query see; (0, -1) without keys or queries."""
    length = call.q.size(2)
    keys = call.memory_len + length
    if length == 0:
        return 0, -1
    farthest = keys - 1 if call.window is None else min(keys, call.window) - 1
    return (0 if call.causal else 1 - length), farthest


def check_values(call: Call) -> None:
    """Reads `start` and `end` and refuses values outside [0, S], and an `r` too short for what they leave visible.

    Raises:
        ValueError: with the argument, the value given, and what is accepted.
    """
    keys = call.memory_len + call.q.size(2)
    for name, bound in (("start", call.start), ("end", call.end)):
        if bound is not None and bound.numel() and (int(bound.min()) < 0 or int(bound.max()) > keys):
            raise ValueError(
                f"{name} must hold key indices in [0, M + L] = [0, {keys}], got values from {int(bound.min())} to "
                f"{int(bound.max())}"
            )
    if table_covers(call, *distance_range(call)):
        return
    low, high = intervals(call)
    at = torch.arange(call.memory_len, keys, device=call.q.device)
    seen = low < high
    if bool(seen.any()):
        nearest = int((at - high + 1).expand_as(seen)[seen].min())
        farthest = int((at - low).expand_as(seen)[seen].max())
        require_table(call, nearest, farthest)


def table_covers(call: Call, nearest: int, farthest: int) -> bool:
    """Whether r has a row for every distance of [nearest, farthest]."""
    return nearest > farthest or (nearest + call.zero_row >= 0 and farthest + call.zero_row < call.r.size(1))


def require_table(call: Call, nearest: int, farthest: int) -> None:
    """Raises ValueError, naming the rows needed, if a visible distance has no row in r."""
    if not table_covers(call, nearest, farthest):
        need_zero = max(call.zero_row, -nearest)
        raise ValueError(
            f"r has {call.r.size(1)} rows with distance 0 in row zero_row={call.zero_row}, so distances "
            f"{-call.zero_row} to {call.r.size(1) - 1 - call.zero_row}, but distances {nearest} to {farthest} are "
            f"visible: r needs {need_zero + farthest + 1} rows with zero_row={need_zero}"
        )
