"""One checked call of `rel_attention`: what every backend receives."""

from typing import NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """Tensors and settings in the order of the operators' schema. Shapes as in `rel_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    content_bias: Tensor
    position_bias: Tensor
    k_mem: Tensor | None
    v_mem: Tensor | None
    start: Tensor | None  # int32 [B, L]
    end: Tensor | None  # int32 [B, L]
    seed: Tensor | None  # int64 [1]; present if dropout_p > 0
    causal: bool
    window: int | None
    zero_row: int
    scale: float
    dropout_p: float

    @property
    def memory_len(self) -> int:
        return 0 if self.k_mem is None else self.k_mem.size(2)


def empty_like_rows(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape and dtype, with x's strides where they leave the last axis contiguous."""
    y = torch.empty_like(x)
    # empty_like sorts the strides of a tensor that overlaps itself (expanded, unfolded) in its own way.
    return y if y.shape[-1] <= 1 or y.stride()[-1] == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_gradients(call: Call) -> tuple[Tensor, ...]:
    """Uninitialised gradients of Call's first eight fields, as the backward operator returns them; empty for no memory."""
    return tuple(call.q.new_empty(0) if x is None else empty_like_rows(x) for x in call[:8])
