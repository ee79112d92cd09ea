"""The `reference` backend: plain PyTorch, any device and float dtype, differentiable to any order.

It builds the L x S scores in memory; float16 and bfloat16 are computed in float32.
"""

import torch
from torch import Tensor

from txl_kernels.backends.devices import can_autocast
from txl_kernels.backends.protocol import HeadWidths, Plans
from txl_kernels.call import Call, dropout
from txl_kernels.call.fields import is_bounded, memory_len_of
from txl_kernels.call.intervals import intervals

NAME = "reference"
DTYPES = None
HEAD_WIDTHS = HeadWidths()
READS_BOUNDS = True


def cannot_run(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Runs everywhere."""
    return None


def refuses(call: Call) -> str | None:
    """Takes every call."""
    return None


def forward(call: Call, plans: Plans | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor]:
    """(out [B, H, L, D] in q's dtype, lse [B, H, L] in float32 or float64). Paper, section 3.3."""
    if can_autocast(call.q.device.type):
        with torch.autocast(call.q.device.type, enabled=False):
            return _attend(call)
    return _attend(call)


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    dtype = call.q.dtype if call.q.dtype == torch.float64 else torch.float32
    q, r, u, w = (x.to(dtype) for x in (call.q, call.r, call.content_bias, call.position_bias))
    k, v = call.k.to(dtype), call.v.to(dtype)
    if call.k_mem is not None and call.v_mem is not None:
        k, v = torch.cat([call.k_mem.to(dtype), k], 2), torch.cat([call.v_mem.to(dtype), v], 2)
    batch, heads, length, _ = q.shape
    keys = k.size(2)

    low, high = intervals(call)
    j = torch.arange(keys, device=q.device)
    seen = ((low.unsqueeze(-1) <= j) & (j < high.unsqueeze(-1))).unsqueeze(1)  # [B or 1, 1, L, S]
    # What no query sees may hold anything, a memory not filled yet say, and 0 * NaN is NaN.
    used = seen.any(2).unsqueeze(-1)
    k, v = k.where(used, 0.0), v.where(used, 0.0)
    alive = seen.any(-1, keepdim=True)
    q = q.where(alive, 0.0)
    score = (q + u.unsqueeze(1)) @ k.mT
    if r.size(1):
        distance = torch.arange(memory_len_of(call), keys, device=q.device).unsqueeze(-1) - j  # [L, S]
        row = (call.zero_row + distance).clamp(0, r.size(1) - 1)
        if torch.compiler.is_compiling() and is_bounded(call):
            inside = ((call.zero_row + distance >= 0) & (call.zero_row + distance < r.size(1))) | ~seen
            torch._assert_async(inside.all(), "r has no row for a distance that start and end leave visible")
        met = torch.zeros(r.size(1), device=r.device, dtype=torch.bool)
        met = met.index_put((row,), seen.any(0)[0], accumulate=True)
        r = r.where(met.unsqueeze(-1), 0.0)
        score = score + ((q + w.unsqueeze(1)) @ r.mT).gather(3, row.expand(batch, heads, length, keys))
    score = (score * float(call.scale)).masked_fill(~seen, -torch.inf)

    # A query without keys: its row of -inf would make NaN in the softmax and in its gradient.
    score = score.masked_fill(~alive, 0.0)
    lse = score.logsumexp(-1, keepdim=True) if keys else score.new_zeros(batch, heads, length, 1)
    p = (score - lse).exp() * alive
    if call.seed is not None and call.dropout_p > 0:
        keep = dropout.keep_mask(call.seed, batch, heads, length, keys, call.dropout_p)
        p = p * keep / (1.0 - call.dropout_p)
    out = (p @ v).to(call.q.dtype)
    return out, lse.masked_fill(~alive, -torch.inf).squeeze(-1)
