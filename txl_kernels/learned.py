"""Attention with a learned term of the distance, for new models: the attention of Thinking
Machines' Inkling as a layer."""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from txl_kernels.attention_layer import AttentionLayer, Terms
from txl_kernels.checks import Window, check_integer, check_scale
from txl_kernels.composed import Chunk
from txl_kernels.linear import project


class LearnedRelativeAttention(AttentionLayer):
    """Multi-head attention with a learned term of the distance, as in Inkling.

    Each position has, beside its query q, a position query p for each head. Query i adds to the
    score of the key at distance d its product with row d of one table that all heads share:

        score[i, j] = scale * q_i . k_j + p_i . table[d]

    Distances without a row add nothing, so the cost of far keys is that of plain attention, and the
    layer takes sequences of any length. The table begins at zero: an untrained layer ignores
    positions. The layer has no residual connection and no dropout on the output.

    Args:
        d_model: width of the hidden states.
        n_head, d_head: number of heads H and their width D; d_head None for d_model // n_head.
        extent: number of distances with a row, from 0 on. With window=W, extent=W suffices.
        n_kv_head: number of heads of keys and values, a divisor of n_head: n_head / n_kv_head query
            heads share one. None for n_head.
        position_width: width Dp of the position queries and of the table's rows.
        qk_norm: True to normalize queries and keys by an RMS norm of each head
            (`torch.nn.RMSNorm`, one weight [D] for queries and one for keys).
        sink: True for a learned logit of each head that takes weight but has no value, so that a
            query can attend to nothing; it begins at 0.
        scale: the factor of q . k; None for 1 / sqrt(D). p . table is not scaled.
        attn_dropout: probability of dropping an attention weight in training.
        causal: False for an encoder: the table then has rows for distances from -(extent - 1) to
            extent - 1, in this order.
        window, chunk: as in `rel_attention`. A window gives sliding attention.
        batch_first: True if hidden states are [B, L, d_model], False if [L, B, d_model]; so are
            memory and result. Neither layout is copied.
        backend: as in `rel_attention`.

    Attributes:
        qkv, p, out: the projections, `torch.nn.Linear` without biases; qkv has rows for q, then k,
            then v.
        table: [extent, Dp] ([2 * extent - 1, Dp] if not causal).
        q_norm, k_norm: the norms, or None.
        sink: [H], or None.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Example:
        >>> layer = LearnedRelativeAttention(d_model=64, n_head=4, n_kv_head=2, extent=32)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    position_scale = 1.0
    outside = "zero"
    shown = (
        "d_model", "n_head", "d_head", "n_kv_head", "extent", "position_width", "scale", "attn_dropout", "causal", "window",
        "chunk", "batch_first", "backend",
    )  # fmt: skip

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        *,
        extent: int,
        n_kv_head: int | None = None,
        position_width: int = 16,
        qk_norm: bool = False,
        sink: bool = False,
        scale: float | None = None,
        attn_dropout: float = 0.0,
        causal: bool = True,
        window: Window = None,
        chunk: Chunk = None,
        batch_first: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__(
            d_model, n_head, d_head, n_kv_head=n_kv_head, attn_dropout=attn_dropout, causal=causal, window=window,
            chunk=chunk, batch_first=batch_first, backend=backend, device=device, dtype=dtype, **unknown,
        )  # fmt: skip
        check_integer("extent", extent, 1, "an integer >= 1")
        check_integer("position_width", position_width, 1, "an integer >= 1")
        for name, flag in (("qk_norm", qk_norm), ("sink", sink)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
        if scale is not None:
            check_scale("scale", scale)
        self.extent, self.position_width, self.scale = extent, position_width, scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.p = nn.Linear(d_model, n_head * position_width, bias=False, **factory)
        rows = extent if causal else 2 * extent - 1
        self.table = nn.Parameter(torch.zeros(rows, position_width, **factory))
        self.q_norm, self.k_norm = (nn.RMSNorm(self.d_head, **factory) if qk_norm else None for _ in range(2))
        self.sink = nn.Parameter(torch.zeros(n_head, **factory)) if sink else None

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, qk_norm={self.q_norm is not None}, sink={self.sink is not None}"

    def reset_parameters(self) -> None:
        """Initialize the parameters: projections as `nn.Linear` does, norms to one, table and sink
        to zero.

        Needed after `to_empty`, for example, which leaves them uninitialized.
        """
        for module in (self.qkv, self.p, self.out, self.q_norm, self.k_norm):
            if module is not None:
                module.reset_parameters()
        for parameter in (self.table, self.sink):
            if parameter is not None:
                nn.init.zeros_(parameter)

    @property
    def _like(self) -> Tensor:
        return self.table

    def _table(
        self, length: int, memory_len: int, positions: Tensor | None = None, *, like: Tensor
    ) -> tuple[Tensor, int]:
        if positions is not None:
            raise TypeError(f"{type(self).__name__} takes no positions: it has one table, with a row for each distance")
        return self.table.unsqueeze(0), 0 if self.causal else self.extent - 1

    def _terms(self, x: Tensor) -> Terms:
        return Terms(q_pos=self._by_head(project(self.p, x), self.position_width), sink=self.sink)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        *queries, k, v = super()._split(projected)
        return (*(self._normed(self.q_norm, q) for q in queries), self._normed(self.k_norm, k), v)

    def _normed(self, norm: nn.RMSNorm | None, x: Tensor) -> Tensor:
        """Return queries or keys [B, heads, L, D] with each head normalized."""
        if norm is None:
            return x
        x = x.to(norm.weight.dtype)  # under autocast, x has a narrower type than the weight
        normed: Tensor = norm(self._heads_last(x)).permute(self._head_axes)  # in the order of the projection's output
        return normed
