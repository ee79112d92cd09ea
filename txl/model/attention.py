"""Attention modules for each position encoding; that of the paper is `RelAttention`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.errors import TxlError
from txl.model.config import ModelConfig
from txl_kernels import RelAttention
from txl_kernels.layer import SegmentAttention
from txl_kernels.linear import ALL, project, project_parts

Biases = tuple[nn.Parameter, nn.Parameter]  # u and v of the paper, shared by all layers


class ShawAttention(SegmentAttention):
    """Shaw et al. 2018: terms (a) and (b) of the paper's scores, with r a learned vector for each
    head and distance.

    Args:
        table_len: number of distances with a row in the table, from 0 on; longer distances use the
            last.
        others: as in `RelAttention`.

    Attributes:
        table: [H, table_len, D], row d for distance d.
    """

    def __init__(self, d_model: int, n_head: int, d_head: int, table_len: int, **options: Any) -> None:
        super().__init__(d_model, n_head, d_head, **options)
        if table_len < 1:
            raise TxlError(f"table_len must be >= 1, got {table_len}")
        self.table = nn.Parameter(torch.zeros(n_head, table_len, d_head))

    def positions(self, length: int, memory_len: int, *, like: Tensor | None = None) -> Tensor:
        """Return the table's row indices [T] for distances 0, 1, ..; like: as in
        `SegmentAttention`."""
        longest = self.table.size(1) - 1
        device = self.table.device if like is None else like.device
        return self.distances(length, memory_len, device).clamp(max=longest)

    def project_positions(self, positions: Tensor) -> Tensor:
        return self.table[:, positions]

    def biases(self) -> tuple[Tensor, Tensor]:
        none = self.table.new_zeros(self.n_head, self.d_head)
        return none, none


class ReleasedShawAttention(ShawAttention):
    """Shaw's attention as in the released code (attn_type 1): adds a bias u . k (term c) and a bias
    for each distance (term d).

    The heads are widened for the kernel by at least one feature, to a multiple of 8 so that rows
    stay aligned. In the first added feature r holds the bias of its distance, the position bias 1,
    and q, k and v hold 0. So the bias of the distance becomes one more term of the score, and the
    scale remains that of D.

    Attributes:
        content_bias: [H, D], the released r_w_bias.
        distance_bias: [H, table_len], the released r_bias.
    """

    def __init__(self, d_model: int, n_head: int, d_head: int, table_len: int, **options: Any) -> None:
        super().__init__(d_model, n_head, d_head, table_len, **options)
        self.scale = d_head**-0.5
        self.content_bias = nn.Parameter(torch.zeros(n_head, d_head))
        self.distance_bias = nn.Parameter(torch.zeros(n_head, table_len))

    @property
    def kernel_width(self) -> int:
        return (self.d_head // 8 + 1) * 8

    def _widen(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.kernel_width - x.size(-1)))

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._widen(x) for x in super()._split(projected))

    def _merge(self, x: Tensor) -> Tensor:
        return super()._merge(x[..., : self.d_head])

    def project_positions(self, positions: Tensor) -> Tensor:
        numbers = self.distance_bias[:, positions].unsqueeze(-1)
        return self._widen(torch.cat([self.table[:, positions], numbers], -1))

    def biases(self) -> tuple[Tensor, Tensor]:
        one = self._widen(self.content_bias.new_ones(self.n_head, 1))
        return self._widen(self.content_bias), one.roll(self.d_head, 1)


class AbsoluteAttention(nn.Module):
    """Causal attention over memory and segment by torch's fused scaled_dot_product_attention.

    Scores hold no positions: positions are added to the hidden states (Vaswani et al. 2017).

    Args:
        window: keys a query sees, its own position included; None for all.
    """

    def __init__(
        self, d_model: int, n_head: int, d_head: int, *, attn_dropout: float = 0.0, window: int | None = None
    ) -> None:
        super().__init__()
        self.n_head, self.d_head, self.attn_dropout, self.window = n_head, d_head, attn_dropout, window
        width = n_head * d_head
        self.qkv = nn.Linear(d_model, 3 * width, bias=False)  # rows: q, then k, then v
        self.out = nn.Linear(width, d_model, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute [B, H, L, D] from q [B, H, L, D], k and v [B, H, M + L, D]."""
        p = self.attn_dropout if self.training else 0.0
        if q.size(2) == k.size(2) and self.window is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        if q.size(2) == 1 and self.window is None:  # a single query at the end sees all keys
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        query = torch.arange(k.size(2) - q.size(2), k.size(2), device=q.device).unsqueeze(1)
        key = torch.arange(k.size(2), device=q.device)
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=p)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Attend from [B, L, d_model] to memory [B, M, d_model] and itself -> [B, L, d_model]. Both
        inputs include their positions."""
        width = self.n_head * self.d_head
        parts = [(x, ALL)]
        if memory is not None:
            parts.append((memory, slice(width, None)))
        projected, *others = project_parts(self.qkv, 1, *parts)
        q, k, v = projected.split(width, -1)
        if memory is not None:
            k_mem, v_mem = others[0].split(width, -1)
            k, v = torch.cat([k_mem, k], 1), torch.cat([v_mem, v], 1)
        q, k, v = (part.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2) for part in (q, k, v))
        return project(self.out, self.attend(q, k, v).transpose(1, 2).flatten(-2))


def make_attention(config: ModelConfig, biases: Biases | None) -> SegmentAttention | AbsoluteAttention:
    """Make the attention module of a layer for the encoding that config names."""
    sizes = (config.d_model, config.n_head, config.d_head)
    if config.absolute:
        return AbsoluteAttention(*sizes, attn_dropout=config.attn_dropout, window=config.window)
    if config.encoding == "relative":
        content_bias, position_bias = biases if biases is not None else (None, None)
        return RelAttention(
            *sizes, attn_dropout=config.attn_dropout, window=config.window, clamp_len=config.clamp_len,
            content_bias=content_bias, position_bias=position_bias,
        )  # fmt: skip
    assert config.table_len is not None
    kind = ShawAttention if config.encoding == "shaw" else ReleasedShawAttention
    return kind(*sizes, config.table_len, attn_dropout=config.attn_dropout, window=config.window)
