"""Adaptive input (Baevski and Auli 2019): embeddings that are narrower for rarer tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.model.network_config import NetworkConfig


class AdaptiveEmbedding(nn.Module):
    """sqrt(d_model) * P_i E_i[x - l_i] for a token x of bin i, whose first token is l_i.

    Attributes:
        tables: E_i [tokens of bin i, d_embed // div_val^i]; with div_val 1 one table for all.
        projections: P_i [d_model, width of E_i], under "i"; with div_val 1 one, if any is needed.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.bins, self.d_model, self.word_dropout = config.bins, config.d_model, config.word_dropout
        self.tables = nn.ParameterList(torch.empty(rows, width) for rows, width in table_shapes(config))
        self.projections = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.empty(config.d_model, width))
                for i, (_, width) in enumerate(table_shapes(config))
                if needs_projection(config, width)
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] integers -> [B, L, d_model]. Looks up the rows that are met, no others."""
        kept = self._kept_rows()
        if len(self.tables) == 1:
            return self._embed(0, tokens, kept)
        flat = tokens.flatten()
        bounds = self.bins.bounds
        result: Tensor = self.tables[0].new_zeros(len(flat), self.d_model)
        for i in range(len(self.tables)):
            rows = ((flat >= bounds[i]) & (flat < bounds[i + 1])).nonzero().squeeze(1)
            # A bin without tokens takes part too, so that every parameter gets a gradient.
            result = result.index_copy(0, rows, self._embed(i, flat[rows], kept))
        return result.view(*tokens.shape, self.d_model)

    def of_any_bin(self, tokens: Tensor) -> Tensor:
        """As `forward` without dropout, and without asking the device which tokens are of which
        bin: each bin embeds all of them. For a few tokens."""
        if len(self.tables) == 1:
            return self._embed(0, tokens, None)
        bounds = self.bins.bounds
        result = self._embed(0, tokens.clamp(max=bounds[1] - 1), None)
        for i in range(1, len(self.tables)):
            embedded = self._embed(i, tokens.clamp(bounds[i], bounds[i + 1] - 1), None)
            result = torch.where((tokens >= bounds[i]).unsqueeze(-1), embedded, result)
        return result

    def _embed(self, i: int, tokens: Tensor, kept: Tensor | None) -> Tensor:
        embedded = F.embedding(tokens - self.bins.bounds[i] if i else tokens, self.tables[i])
        if kept is not None:
            embedded = embedded * kept[tokens].unsqueeze(-1)
        if str(i) in self.projections:
            embedded = F.linear(embedded, self.projections[str(i)]).to(embedded.dtype)  # also under autocast
        return embedded * math.sqrt(self.d_model)

    def _kept_rows(self) -> Tensor | None:
        """[V]: 0 or 1 / (1 - p), drawn once a segment; None without dropout."""
        if not self.training or self.word_dropout == 0:
            return None
        kept = 1 - self.word_dropout
        rows: Tensor = self.tables[0].new_empty(self.bins.vocab_size).bernoulli_(kept) / kept
        return rows


def table_shapes(config: NetworkConfig) -> list[tuple[int, int]]:
    """Rows and width of each table of embeddings."""
    bins = config.bins
    if config.div_val == 1:
        return [(bins.vocab_size, bins.d_embed)]
    return [(bins.bounds[i + 1] - bins.bounds[i], width) for i, width in enumerate(bins.widths)]


def needs_projection(config: NetworkConfig, width: int) -> bool:
    """With div_val > 1 the released code projects bins that have d_model already, too."""
    return width != config.d_model or (config.div_val > 1 and config.proj_same_dim)
