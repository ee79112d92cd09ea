"""The `reference` backend: plain PyTorch, for any device and floating dtype, differentiable to any
order.

It stores the L x S scores, and computes float16 and bfloat16 in float32.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from txl_kernels.backends.limits import REFERENCE
from txl_kernels.backends.protocol import Prepared
from txl_kernels.call import Call, intervals, keep_mask, keep_scale, memory_len_of, table_len_of
from txl_kernels.checks import can_autocast

NAME = "reference"
LIMITS = REFERENCE
READS_BOUNDS = True


def why_not_tensors(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Return None: this backend runs everywhere."""
    return None


def forward(call: Call, prepared: Prepared | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, L, D of v] in q's dtype, lse [B, H, L] in float32, or float64 for
    float64).

    The formula is that of the paper, section 3.3, as `rel_attention` states it.
    """
    with without_autocast(call.q.device.type):
        return _attend(call)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which torch.autocast does not narrow products."""
    return torch.autocast(device_type, enabled=False) if can_autocast(device_type) else nullcontext()


def weights(call: Call) -> Tensor:
    """Return the weights of a checked call before dropout, [B, H, L, S], in float32 (float64 for
    float64)."""
    with without_autocast(call.q.device.type):
        return _weights(call)[0]


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    dtype = exact(call.q.dtype)
    v = call.v.to(dtype)
    if call.v_mem is not None:
        v = torch.cat([call.v_mem.to(dtype), v], 2)
    p, lse, used = _weights(call)
    v = _for_each_head(v, p.size(1))
    if call.seed is not None and call.dropout_p > 0:
        batch, heads, length, keys = p.shape
        keep = keep_mask(call.seed, batch, heads, length, keys, call.dropout_p)
        p = p * keep * keep_scale(call.dropout_p)
    out = (p @ v.where(used, 0.0)).to(call.q.dtype)
    return out, lse


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Return keys or values [B, Hkv, S, D], those of each head repeated for the query heads that
    read it, [B, heads, S, D]."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def _biased(q: Tensor, bias: Tensor | None) -> Tensor:
    """Return queries [B, H, L, D] plus a bias [H, D] in their dtype."""
    return q if bias is None else q + bias.to(q.dtype).unsqueeze(1)


def share_beside(sink: Tensor, lse: Tensor) -> Tensor:
    """Return the keys' share of the softmax's denominator beside a sink, e^lse / (e^lse + e^sink);
    0 for a query without keys, in forward and backward."""
    empty = torch.isneginf(lse)
    return (lse.masked_fill(empty, 0.0) - sink.to(lse.dtype)).sigmoid().masked_fill(empty, 0.0)


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _weights(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights before dropout, [B, H, L, S], beside the sink if there is one; lse [B, H,
    L] of the keys alone; and whether any query sees a key, bool [B or 1, 1, S, 1]."""
    dtype = exact(call.q.dtype)
    q, k = call.q.to(dtype), call.k.to(dtype)
    if call.k_mem is not None:
        k = torch.cat([call.k_mem.to(dtype), k], 2)
    k = _for_each_head(k, q.size(1))
    q_pos = q if call.q_pos is None else call.q_pos.to(dtype)
    sink = call.sink
    keys = k.size(2)
    low, high = intervals(call)
    at = torch.arange(memory_len_of(call), keys, device=q.device)
    batch, heads, length, _ = q.shape
    j = torch.arange(keys, device=q.device)
    seen = ((low.unsqueeze(-1) <= j) & (j < high.unsqueeze(-1))).unsqueeze(1)  # [B or 1, 1, L, S]
    # Keys that no query sees may hold any values (a memory that is not filled yet), and 0 * NaN is
    # NaN.
    used = seen.any(2).unsqueeze(-1)
    k = k.where(used, 0.0)
    alive = seen.any(-1, keepdim=True)
    q, q_pos = q.where(alive, 0.0), q_pos.where(alive, 0.0)
    score = _biased(q, call.content_bias) @ k.mT
    one_factor = call.position_scale == call.scale
    rows_of_table = table_len_of(call)
    if rows_of_table > 0:  # torch.compile of torch 2.6 makes a constant of a size whose truth is asked
        row = call.zero_row + at.unsqueeze(-1) - j  # [L, S]
        outside = (row < 0) | (row >= rows_of_table)
        if torch.compiler.is_compiling() and not call.zero_outside:
            torch._assert_async((~(outside & seen)).all(), "r has no row for a distance that a query sees")
        row = row.clamp(0, rows_of_table - 1)
        met = torch.zeros(rows_of_table, device=q.device, dtype=torch.bool)
        met = met.index_put((row,), seen.any(0)[0] & ~outside, accumulate=True)
        position = torch.zeros_like(score)
        if call.r is not None:
            r = call.r.to(dtype).where(met.unsqueeze(-1), 0.0)
            position = (_biased(q_pos, call.position_bias) @ r.mT).gather(3, row.expand(batch, heads, length, keys))
        if call.r_bias is not None:
            position = position + call.r_bias.to(dtype).where(met, 0.0)[:, row]
        position = position.masked_fill(outside, 0.0)
        if not one_factor:
            score, position = score * float(call.scale), position * float(call.position_scale)
        score = score + position
    if one_factor or rows_of_table == 0:
        score = score * float(call.scale)
    if call.softcap:
        score = float(call.softcap) * (score / float(call.softcap)).tanh()
    score = score.masked_fill(~seen, -torch.inf)

    # For a query without keys, a row of -inf would give NaN in the softmax and in its gradient.
    score = score.masked_fill(~alive, 0.0)
    p, lse = softmax(score, -1) if keys > 0 else (score, score.sum(-1))
    lse = lse.masked_fill(~alive.squeeze(-1), -torch.inf)
    p = p * alive
    return p if sink is None else p * share_beside(sink, lse).unsqueeze(-1), lse, used


def softmax(score: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the softmax of `score` along `dim`, which must not be empty, and lse, without that
    axis.

    Weights and both gradients are computed relative to the largest score. exp(score - lse) would
    not be exact for large scores: lse is the sum of the largest score and the logarithm of the sum
    of weights, and rounding loses the latter.
    """
    top = score.detach().amax(dim, keepdim=True)
    return score.softmax(dim), ((score - top).exp().sum(dim, keepdim=True).log() + top).squeeze(dim)
