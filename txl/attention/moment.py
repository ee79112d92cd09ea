"""Attention at one place of the text, row by row: figure 6, and the page to look around in."""

import torch
from torch import Tensor

from txl.attention.reading import Part
from txl.attention.terms import Terms


class Moment:
    """Weights of `count` successive queries.

    Args:
        layers, heads, window: sizes.
        first: the first of the queries, numbered as their tokens in the text.

    Attributes:
        weights: [n_layer * H, count, W] float32; column d is the key d positions before.
        shares: [n_layer * H, count, 4] float32, of the terms (a), (b), (c), (d), see `shares`.
        seen: how many of the queries have been added.
    """

    def __init__(self, layers: int, heads: int, window: int, first: int, count: int) -> None:
        self.heads, self.first, self.count, self.seen = heads, first, count, 0
        self.weights = torch.zeros(layers * heads, count, window)
        self.shares = torch.zeros(layers * heads, count, 4)

    def add(self, layers: list[Part]) -> None:
        """Takes from what `read_terms` yields the queries that are wanted."""
        first, length = layers[0].first, layers[0].terms.content.size(1)
        begin, end = max(self.first, first), min(self.first + self.count, first + length)
        if begin >= end:
            return
        there, here = slice(begin - first, end - first), slice(begin - self.first, end - self.first)
        for part in layers:
            rows = slice(part.layer * self.heads, (part.layer + 1) * self.heads)
            a, b, c, d = part.terms
            terms = Terms(a[:, there], b[:, there], c[:, there], d)
            self.weights[rows, here] = terms.score.softmax(-1).float().cpu()
            self.shares[rows, here] = shares(terms).float().cpu()
        self.seen += end - begin


def shares(terms: Terms) -> Tensor:
    """How much of the variance of a query's scores over its keys is each term's, [H, L, 4].

    cov(term, score) / var(score), so the four sum to 1; one is below 0 where a term works against
    the others. 0 where all scores are the same.
    """
    a, b, c, d = terms
    parts = torch.stack([a, b, c, d.unsqueeze(1).expand_as(a)], 2).double()  # [H, L, 4, W]
    parts = parts - parts.mean(-1, keepdim=True)
    score = parts.sum(2, keepdim=True)
    variance = (score * score).sum(-1)
    return torch.where(variance > 0, (parts * score).sum(-1) / variance.clamp(min=1e-300), 0.0)
