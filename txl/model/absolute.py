"""Attention whose scores hold no positions: they are in the hidden states (Vaswani et al. 2017)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AbsoluteAttention(nn.Module):
    """Causal attention over memory and segment by torch's fused scaled_dot_product_attention.

    Args:
        window: keys a token sees, itself included; None for all.

    Attributes:
        attend: what computes it from q [B, H, L, D], k and v [B, H, M + L, D].
    """

    def __init__(
        self, d_model: int, n_head: int, d_head: int, *, attn_dropout: float = 0.0, window: int | None = None
    ) -> None:
        super().__init__()
        self.n_head, self.d_head, self.attn_dropout, self.window = n_head, d_head, attn_dropout, window
        width = n_head * d_head
        self.qkv = nn.Linear(d_model, 3 * width, bias=False)  # rows: q, then k, then v
        self.out = nn.Linear(width, d_model, bias=False)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = self._fused

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = self.attn_dropout if self.training else 0.0
        if q.size(2) == k.size(2) and self.window is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        if q.size(2) == 1 and self.window is None:  # one query at the end sees all
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        query = torch.arange(k.size(2) - q.size(2), k.size(2), device=q.device).unsqueeze(1)
        key = torch.arange(k.size(2), device=q.device)
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, queries: Tensor | None = None) -> Tensor:
        """[B, L, d_model] with memory [B, M, d_model], positions in both -> [B, L, d_model].

        queries: [B, L, d_model], what q is projected from; None for x.
        """
        width = self.n_head * self.d_head
        q, k, v = self.qkv(x).split(width, -1)
        if queries is not None:
            q = F.linear(queries, self.qkv.weight[:width])
        if memory is not None:
            k_mem, v_mem = F.linear(memory, self.qkv.weight[width:]).split(width, -1)
            k, v = torch.cat([k_mem, k], 1), torch.cat([v_mem, v], 1)
        parts = q, k, v
        q, k, v = (part.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2) for part in parts)
        projected: Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return projected
