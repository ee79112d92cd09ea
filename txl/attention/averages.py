"""Mean attention by distance, of every head: figures 5 and 7 of the paper."""

import torch
from torch import Tensor

from txl.attention.reading import Part
from txl.errors import TxlError

TERMS = ("a", "b", "d")  # the paper leaves out (c), the prior of each key


class Averages:
    """Sums over queries, as much memory for a long text as for a short one.

    Rows are heads, layer by layer; column d is distance d.

    Args:
        layers, heads, window: sizes.

    Attributes:
        queries: how many have been added.
    """

    def __init__(self, layers: int, heads: int, window: int) -> None:
        self.heads, self.queries = heads, 0
        self._weights, self._a, self._b, self._d = torch.zeros(4, layers * heads, window, dtype=torch.float64)

    def add(self, layers: list[Part]) -> None:
        """Takes what `read_terms` yields."""
        for part in layers:
            rows = slice(part.layer * self.heads, (part.layer + 1) * self.heads)
            self._weights[rows] += _mass(part.terms.score)
            self._a[rows] += _mass(part.terms.content)
            self._b[rows] += _mass(part.terms.content_position)
            self._d[rows] = part.terms.position_bias.softmax(-1).double().cpu()  # the same for every query
        self.queries += layers[0].terms.content.size(1)

    def mean(self) -> Tensor:
        """Figure 5: mean weight of the keys at each distance, [n_layer * H, W]; rows sum to 1."""
        self._check()
        mean: Tensor = self._weights / self.queries
        return mean

    def mean_of(self, term: str) -> Tensor:
        """Figure 7: the same of the softmax of one term alone, "a", "b" or "d"."""
        self._check()
        means: dict[str, Tensor] = {"a": self._a / self.queries, "b": self._b / self.queries, "d": self._d}
        return means[term]

    def widest(self, layer: int) -> int:
        """The head of a layer (from 0) whose mean attention has the largest entropy; counted over
        all layers, from 0."""
        rows = self.mean()[layer * self.heads : (layer + 1) * self.heads]
        return layer * self.heads + int(torch.special.entr(rows).sum(-1).argmax())

    def _check(self) -> None:
        if not self.queries:
            raise TxlError("no query has been added yet")
        if not bool(self._weights.isfinite().all()):
            raise TxlError("the attention is not finite: the model's parameters are damaged, or it diverged")


def _mass(scores: Tensor) -> Tensor:
    """[H, L, W] -> sum over queries of their softmax, [H, W] float64."""
    return scores.softmax(-1).sum(1, dtype=torch.float64).cpu()
