"""The four terms of a layer's scores, told apart (paper, section 3.3)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from txl_kernels.layer import SegmentAttention


class Terms(NamedTuple):
    """Scaled scores by distance: column d is the key d positions before the query.

    Attributes:
        content: (a), q . k, [H, L, W].
        content_position: (b), q . r, [H, L, W].
        content_bias: (c), u . k, [H, L, W].
        position_bias: (d), v . r, [H, W].
    """

    content: Tensor
    content_position: Tensor
    content_bias: Tensor
    position_bias: Tensor

    @property
    def score(self) -> Tensor:
        """What the softmax takes, [H, L, W]."""
        return self.content + self.content_position + self.content_bias + self.position_bias.unsqueeze(1)


def score_terms(attention: SegmentAttention, x: Tensor, memory: Tensor, window: int) -> Terms:
    """Of queries that see whole windows.

    Args:
        x: [1, L, d_model], what the layer's projections take.
        memory: [1, M >= window - 1, d_model], alike, what was before it.
        window: keys of a query, W, itself included.
    """
    q, k, k_mem, r = attention.projections(x, memory)
    assert k_mem is not None
    assert k_mem.size(2) >= window - 1
    scale = 1 / math.sqrt(q.size(-1)) if attention.scale is None else attention.scale
    u, v = attention.biases()
    keys = torch.cat([k_mem[0, :, k_mem.size(2) - (window - 1) :], k[0]], 1).flip(1)  # the last key first
    table = r[:, :window]
    return Terms(
        _by_distance(q[0] @ keys.mT, window) * scale,
        q[0] @ table.mT * scale,
        _by_distance((keys @ u.unsqueeze(-1)).mT.expand(-1, q.size(2), -1).contiguous(), window) * scale,
        (table @ v.unsqueeze(-1)).squeeze(-1) * scale,
    )


def _by_distance(scores: Tensor, window: int) -> Tensor:
    """[H, L, L + W - 1], the last key first -> [H, L, W], each query's own key first; a view."""
    heads, length, _ = scores.shape
    return scores.as_strided(
        (heads, length, window), (scores.stride(0), scores.stride(1) - 1, 1), scores.storage_offset() + length - 1
    )
