"""Attention weights that are not computed: an object in their place, whose product with values is a
call of the kernels.

Zipformer computes attention weights once, and three modules multiply them by values of their own.
These modules run unchanged: `torch.matmul` of the object and values calls `rel_attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from txl_kernels.checks import autocast_dtype
from txl_kernels.integrations.adapters.lazy_tensor import LazyTensor
from txl_kernels.integrations.attention import Window, attend

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def max_width(device: torch.device) -> int | None:
    """Return the greatest width of values that kernels for a device support, None for any."""
    return None if device.type == "cpu" else 256


class Seen(NamedTuple):
    """The keys that queries see.

    Attributes:
        start, end: int32 [1 or B, 1 or L], or None for all keys.
        alone: None, or bool [1 or B, 1 or L], the queries whose keys are all hidden. The originals'
            weights of these are the same for all keys, which `start` and `end` must show them.
    """

    start: Tensor | None = None
    end: Tensor | None = None
    alone: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """The scores q . k + p . r of the pairs of L queries and S keys, the last L of which are the
    queries', and the keys that queries see.

    Attributes:
        q, k: [B, H, L, D] and [B, H, S, D].
        p, r: position queries [B, H, L, Dp] and the table [H, T, Dp] or [B, H, T, Dp], farthest
            future first; None for scores without positions.
        past: the distance of r's last row.
        window: that of `accelerate`, which limits what `seen` shows.
    """

    q: Tensor
    k: Tensor
    p: Tensor | None
    r: Tensor | None
    past: int
    seen: Seen
    window: Window

    def with_equal_weights(self) -> "Scores":
        """Return scores that are 0 for queries whose keys are all hidden, so that `attend` gives
        all keys the same weight, as the originals do."""
        alone = self.seen.alone
        if alone is None:
            return self
        alone = alone.unsqueeze(1).unsqueeze(-1)
        return replace(self, q=self.q.masked_fill(alone, 0), p=None if self.p is None else self.p.masked_fill(alone, 0))

    def of_heads(self, heads: slice) -> "Scores":
        """Return the scores of some heads."""
        q, k = self.q[:, heads], self.k[:, heads]
        if self.p is None or self.r is None:
            return replace(self, q=q, k=k)
        return replace(self, q=q, k=k, p=self.p[:, heads], r=self.r[..., heads, :, :])

    def of_pairs(self, queries: slice = slice(None)) -> Tensor:
        """Return the scores [H, B, L, S] of all pairs of some queries with keys, before masks."""
        scores = self.q[:, :, queries] @ self.k.transpose(-2, -1)
        if self.p is not None and self.r is not None:
            # A table that is limited to a window has no rows for the pairs outside.
            rows = (self._distances(queries) + (self.r.size(-2) - 1 - self.past)).clamp(0, self.r.size(-2) - 1)
            positions = self.p[:, :, queries] @ self.r.transpose(-2, -1)
            scores = scores + positions.gather(-1, rows.expand(*positions.shape[:3], -1))
        return scores.transpose(0, 1)

    def outside_window(self, queries: slice = slice(None)) -> Tensor | None:
        """Return the pairs [L, S] of some queries with keys outside the window, or None if there is
        no window."""
        if self.window is None:
            return None
        left, right = self.window
        distances = self._distances(queries)
        before = torch.zeros_like(distances, dtype=torch.bool) if left is None else distances > left
        return before if right is None else before | (distances < -right)

    def _distances(self, queries: slice) -> Tensor:
        """Return the distances [L, S] of some queries to the keys, positive for keys before."""
        length, keys = self.q.size(2), self.k.size(2)
        at = torch.arange(keys, device=self.q.device)
        return at[keys - length :][queries].unsqueeze(1) - at

    def attend(self, v: Tensor) -> Tensor:
        """Return the attention [B, H, L, width] with values v [B, H, S, width], of scores as
        `with_equal_weights` returns them."""
        settings: dict[str, Any] = {"q_pos": self.p, "past": self.past}
        if self.p is None:  # a bias of 0 at one distance, and none at others
            settings = {"r_bias": self.q.new_zeros(1, 1), "zero_row": 0, "outside": "zero"}
        settings |= {"window": self.window, "scale": 1.0, "position_scale": 1.0}
        v = v if v.stride(-1) == 1 else v.contiguous()
        parts = v.split(max_width(v.device) or v.size(-1), -1)
        bounds = self.seen.start, self.seen.end
        found = [attend(self.q, self.k, x, self.r, None, None, bounds, **settings) for x in parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)


class PairWeights(LazyTensor):
    """An object that stands for attention weights [H, B, L, S].

    It has their shape. `torch.matmul` of it and values [H, B, S, width] calls the kernels, and a
    slice of heads is such an object, too.
    """

    def __init__(self, scores: Scores, compute: Callable[[Scores], Tensor]) -> None:
        """compute: returns the weights [H, B, L, S] of scores, and counts that."""
        super().__init__(lambda: compute(scores), scores.q.device)
        self._scores = scores
        self._compute_of = compute

    @property
    def shape(self) -> torch.Size:
        batch, heads, length, _ = self._scores.q.shape
        return torch.Size((heads, batch, length, self._scores.k.size(2)))

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return 4

    def matmul(self, values: Any) -> Any:
        return torch.matmul(cast("Tensor", self), values)

    __matmul__ = matmul

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and self._tensor is None:
            return PairWeights(self._scores.of_heads(index), self._compute_of)
        return super().__getitem__(index)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS and not kwargs and isinstance(args[0], PairWeights) and args[0]._takes(args[1]):
            return args[0]._scores.attend(args[1].transpose(0, 1)).transpose(0, 1)
        return super().__torch_function__(function, types, args, kwargs)

    def _takes(self, values: Any) -> bool:
        """Whether the kernels compute the product with these values."""
        if self._tensor is not None or not isinstance(values, Tensor):
            return False
        heads, batch, _, keys = self.shape
        same = values.dtype == self._scores.q.dtype or autocast_dtype(values.device.type) is not None
        return same and values.dim() == 4 and values.shape[:3] == (heads, batch, keys)
