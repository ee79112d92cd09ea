"""Attention with learned relative positions (Shaw et al. 2018), through the same kernel."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.errors import TxlError
from txl_kernels.layer import SegmentAttention


class ShawAttention(SegmentAttention):
    """Terms (a) and (b) of the paper's scores, with a learned vector a head and distance as r.

    Args:
        table_len: distances told apart, from 0 on; longer ones share the last row.
        others: as in `RelAttention`.

    Attributes:
        table: [H, table_len, D], row d for distance d.
    """

    def __init__(self, d_model: int, n_head: int, d_head: int, table_len: int, **options: Any) -> None:
        super().__init__(d_model, n_head, d_head, **options)
        if table_len < 1:
            raise TxlError(f"table_len must be >= 1, got {table_len}")
        self.table = nn.Parameter(torch.zeros(n_head, table_len, d_head))

    def positions(self, length: int, memory_len: int, clamp_len: int | None = None) -> Tensor:
        """Rows of the table [T] for distances 0, 1, .."""
        longest = self.table.size(1) - 1
        return self.distances(length, memory_len, clamp_len, self.table.device).clamp(max=longest)

    def project_positions(self, positions: Tensor) -> Tensor:
        return self.table[:, positions]

    def biases(self) -> tuple[Tensor, Tensor]:
        none = self.table.new_zeros(self.n_head, self.d_head)
        return none, none


class ReleasedShawAttention(ShawAttention):
    """The released code's form (attn_type 1): adds a bias u . k (c) and a number a distance (d).

    The kernel sees heads with room for one more feature: r holds there the number of its distance,
    the position bias 1, and q, k and v hold 0; so the number is added to the score as it is, and
    the scale stays that of D. The room is a multiple of 8, for aligned rows.

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

    def _heads(self, x: Tensor) -> Tensor:
        return self._widen(super()._heads(x))

    def _merge(self, x: Tensor) -> Tensor:
        return super()._merge(x[..., : self.d_head])

    def project_positions(self, positions: Tensor) -> Tensor:
        numbers = self.distance_bias[:, positions].unsqueeze(-1)
        return self._widen(torch.cat([self.table[:, positions], numbers], -1))

    def biases(self) -> tuple[Tensor, Tensor]:
        one = self._widen(self.content_bias.new_ones(self.n_head, 1))
        return self._widen(self.content_bias), one.roll(self.d_head, 1)
