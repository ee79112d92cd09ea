"""Which keys a query sees: one interval a query, and the distances those intervals reach.

Query i stands at key position p_i = M + i; key j is at distance d = p_i - j. A query sees the keys
low <= j < high, the intersection of `ahead`, `window`, `start` and `end`.
"""

import torch
from torch import Tensor

from txl_kernels.call.fields import Call, memory_len_of


def intervals(call: Call) -> tuple[Tensor, Tensor]:
    """First and one-past-last visible key of each query, both int64 [B or 1, L], within [0, S];
    low >= high: none."""
    memory_len, length = memory_len_of(call), call.q.size(2)
    keys = memory_len + length
    at = torch.arange(memory_len, keys, device=call.q.device).unsqueeze(0)
    low = torch.zeros_like(at) if call.window is None else (at - call.window + 1).clamp(min=0)
    high = torch.full_like(at, keys) if call.ahead is None else (at + call.ahead + 1).clamp(max=keys)
    if call.start is not None:
        low = torch.maximum(low, call.start.long())
    if call.end is not None:
        high = torch.minimum(high, call.end.long())
    return low, high


def distance_range(call: Call) -> tuple[int, int]:
    """Smallest and largest distance that `ahead` and `window` let any query see; (0, -1) without
    keys or queries."""
    length = call.q.size(2)
    keys = memory_len_of(call) + length
    if length == 0:
        return 0, -1
    farthest = keys - 1 if call.window is None else min(keys, call.window) - 1
    ahead = length - 1 if call.ahead is None else min(call.ahead, length - 1)
    return -ahead, farthest
