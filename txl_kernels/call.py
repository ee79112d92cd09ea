"""One checked call of `rel_attention`: what every backend receives."""

from typing import NamedTuple

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
