"""Attention over disjoint ranges of keys from attention over each: their results, weighted by each
range's share of the softmax's denominator."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all ranges, from the (out, lse) of each."""
    sums = torch.stack([lse for _, lse in parts])
    # A query that sees no key: of nothing but -inf neither difference nor gradient is a number.
    nothing = torch.isneginf(sums).all(0)
    sums = sums.masked_fill(nothing, 0.0)
    lse = sums.logsumexp(0)
    shares = (sums - lse).exp().unsqueeze(-1)
    out = parts[0][0] * shares[0]
    for (x, _), share in zip(parts[1:], shares[1:], strict=True):
        out = out + x * share
    return out.to(parts[0][0].dtype), lse.masked_fill(nothing, -torch.inf)
