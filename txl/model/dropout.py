"""Dropout: anew at every position, or one mask a segment (Gal and Ghahramani 2016)."""

import torch
from torch import Tensor, nn

from txl.model.network_config import NetworkConfig


class VariationalDropout(nn.Module):
    """Drops features [B, 1, d] of [B, L, d]: for all positions of a segment the same ones."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return hidden
        kept = 1 - self.p
        mask = torch.empty_like(hidden[:, :1]).bernoulli_(kept) / kept
        return hidden * mask

    def extra_repr(self) -> str:
        return f"p={self.p}"


def hidden_dropout(config: NetworkConfig, p: float | None = None) -> nn.Module:
    """Of hidden states [B, L, d] with rate p, None for config.dropout."""
    p = config.dropout if p is None else p
    return VariationalDropout(p) if config.variational_dropout else nn.Dropout(p)
