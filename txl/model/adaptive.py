"""Adaptive input and adaptive softmax: the vocabulary in bins, rarer ones with narrower
embeddings."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from txl.model.config import ModelConfig, NetworkConfig
from txl_kernels.linear import linear

IGNORED = -100  # the target of a position that is not scored


class AdaptiveEmbedding(nn.Module):
    """Adaptive input (Baevski and Auli 2019): narrower embeddings for rarer tokens.

    A token x of bin i, whose first token is l_i, is embedded as sqrt(d_model) * P_i E_i[x - l_i].

    Attributes:
        bounds: first token of each bin, then vocab_size: 0, c_1, .., vocab_size.
        tables: E_i [tokens of bin i, d_embed // div_val^i]; a single table for all bins if div_val
            is 1.
        projections: P_i [d_model, width of E_i], keyed by str(i); at most one if div_val is 1.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.bounds, self.d_model, self.word_dropout = config.bounds, config.d_model, config.word_dropout
        self.tables = nn.ParameterList(torch.empty(rows, width) for rows, width in table_shapes(config))
        self.projections = nn.ParameterDict(
            {
                str(i): nn.Parameter(torch.empty(config.d_model, width))
                for i, (_, width) in enumerate(table_shapes(config))
                if needs_projection(config, width)
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [B, L] integers -> [B, L, d_model]. Only the rows that occur are looked up.

        Raises:
            IndexError: a token is out of range, on a CPU (on a GPU a device-side assertion of torch
                fails).
        """
        kept = self._kept_rows()
        if len(self.tables) == 1:
            return self._embed(0, tokens, kept)
        flat = tokens.flatten()
        result: Tensor = self.tables[0].new_zeros(len(flat), self.d_model)
        which = bin_of(flat, self.bounds)
        for i in range(len(self.tables)):
            rows = (which == i).nonzero().squeeze(1)
            # Bins without tokens are embedded too, so that every parameter gets a gradient.
            result = result.index_copy(0, rows, self._embed(i, flat[rows], kept))
        return result.view(*tokens.shape, self.d_model)

    def _embed(self, i: int, tokens: Tensor, kept: Tensor | None) -> Tensor:
        embedded = F.embedding(tokens - self.bounds[i] if i else tokens, self.tables[i])
        if kept is not None:
            embedded = embedded * kept[tokens].unsqueeze(-1)
        if str(i) in self.projections:
            # back to the embeddings' dtype under autocast
            embedded = F.linear(embedded, self.projections[str(i)]).to(embedded.dtype)
        return embedded * math.sqrt(self.d_model)

    def _kept_rows(self) -> Tensor | None:
        """Scale of each embedding row, [V], with word dropout p: 0 or 1 / (1 - p), drawn once a
        segment; None without word dropout."""
        if not self.training or self.word_dropout == 0:
            return None
        kept = 1 - self.word_dropout
        rows: Tensor = self.tables[0].new_empty(self.bounds[-1]).bernoulli_(kept) / kept
        return rows


def bin_of(tokens: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Return the bin of each token. A token out of range gets the first or last bin, whose lookup
    rejects it."""
    which = torch.zeros_like(tokens)
    for cutoff in bounds[1:-1]:
        which += tokens >= cutoff
    return which


def table_shapes(config: NetworkConfig) -> list[tuple[int, int]]:
    """Return the number of rows and the width of each embedding table."""
    if config.div_val == 1:
        return [(config.vocab_size, config.embed_width)]
    return [(b - a, width) for (a, b), width in zip(pairwise(config.bounds), config.embed_widths, strict=True)]


def needs_projection(config: NetworkConfig, width: int) -> bool:
    """Whether a bin of this width is projected. The released code, if div_val > 1, also projects
    bins whose width is d_model."""
    return width != config.d_model or (config.div_val > 1 and config.proj_same_dim)


class AdaptiveSoftmax(nn.Module):
    """Adaptive softmax (Grave et al. 2017): a head over the first bin and the clusters of rarer
    tokens.

    The head is log_softmax([E_0; C] P'_0^T h + [b_0; b_C]). A token w of bin i >= 1, whose first
    token is l_i, has log-probability head[c_1 + i - 1] + log_softmax(E_i P'_i^T h + b_i)[w - l_i].

    Attributes:
        bounds: first token of each bin, then vocab_size: 0, c_1, .., vocab_size.
        own_tables, own_projections: E_i and P'_i as in `AdaptiveEmbedding`, without those shared
            with the embedding; if div_val is 1 there is a projection for each bin.
        bias: [vocab_size], b_0, b_1, ..
        cluster_weight, cluster_bias: C [bins - 1, d_embed] and b_C [bins - 1], if bins > 1.
    """

    def __init__(self, config: NetworkConfig, embedding: AdaptiveEmbedding | None) -> None:
        """embedding: the module whose tables are used if config ties them; None if there is
        none."""
        super().__init__()
        self.bounds = config.bounds
        self.div_val = config.div_val
        shared = embedding if config.tie_weight else None
        # In a tuple, so that the embedding alone registers the shared tables and they stay tied
        # when their tensors are replaced (`to`, `load_state_dict`).
        self._shared: tuple[AdaptiveEmbedding, ...] = () if shared is None else (shared,)
        tables = [] if shared is not None else [torch.empty(shape) for shape in table_shapes(config)]
        self.own_tables = nn.ParameterList(tables)
        self.own_projections = nn.ParameterDict()
        self._tied_projections: list[str] = []
        for i, width in enumerate(config.embed_widths):
            if needs_projection(config, width):
                if shared is not None and config.ties_projection(i):
                    self._tied_projections.append(str(i))
                else:
                    self.own_projections[str(i)] = nn.Parameter(torch.empty(config.d_model, width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if config.cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(config.cutoffs), config.embed_width))
            self.cluster_bias = nn.Parameter(torch.zeros(len(config.cutoffs)))

    @property
    @torch.jit.unused
    def tables(self) -> nn.ParameterList:
        """The tables E_i, this module's own or the embedding's."""
        return self._shared[0].tables if self._shared else self.own_tables

    @property
    @torch.jit.unused
    def projections(self) -> dict[str, nn.Parameter]:
        """The projections P'_i, this module's own or the embedding's, keyed by str(i)."""
        found = dict(self.own_projections.items())
        for i in self._tied_projections:
            found[i] = self._shared[0].projections["0" if self.div_val == 1 else i]
        return found

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, in nats.

        Only the head and the bins that hold targets are computed, each for its own rows.

        Args:
            hidden: [B, L, d_model].
            targets: [B, L], integers below vocab_size, or -100 for positions that are not scored.

        Returns:
            [B, L] in order of the targets, float32 (float64 if `hidden` is float64); 0 where
            ignored.

        Raises:
            ValueError: targets has another shape, or, on a CPU, a target is out of range (under
                torch.compile torch raises IndexError instead).
        """
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(f"targets must be {list(hidden.shape[:-1])}, like hidden, got {list(targets.shape)}")
        check_targets(targets, self.bounds[-1])
        flat, goal = hidden.flatten(0, -2), targets.flatten()
        first = self.bounds[1]
        which = bin_of(goal, self.bounds)  # 0 for ignored targets
        column = torch.where(which == 0, goal, first + which - 1)
        # Bins without targets are computed too, so that every parameter gets a gradient.
        rows = [(which == i).nonzero().squeeze(1) for i in range(1, len(self.bounds) - 1)]
        scores = self._scores([flat, *(flat[found] for found in rows)])
        nll = F.cross_entropy(scores[0], column, reduction="none", ignore_index=IGNORED)
        for i, found in enumerate(rows, 1):
            tail = F.cross_entropy(scores[i], goal[found] - self.bounds[i], reduction="none")
            nll = nll.index_add(0, found, tail)
        return nll.view(targets.shape)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities: [.., d_model] -> [.., vocab_size], float32 or float64."""
        flat = hidden.flatten(0, -2)
        scores = [x.log_softmax(-1) for x in self._scores([flat] * (len(self.bounds) - 1))]
        first = self.bounds[1]
        tails = [scores[0][:, first + i - 1 : first + i] + scores[i] for i in range(1, len(self.bounds) - 1)]
        return torch.cat([scores[0][:, :first], *tails], -1).view(*hidden.shape[:-1], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores [.., vocab_size] whose softmax is the distribution: the logits if there is
        one bin, else log-probabilities."""
        if len(self.bounds) > 2:
            return self.log_probs(hidden)
        return linear(self._project(0, hidden), self.tables[0], self.bias)

    def _scores(self, hidden: list[Tensor]) -> list[Tensor]:
        """Return the scores of each bin for states [N_i, d_model]: of the head [N_0, c_1 + bins -
        1], then of the tails [N_i, tokens of bin i]; float32 or float64."""
        bounds, projected = self.bounds, [self._project(i, h) for i, h in enumerate(hidden)]
        if len(self.tables) == 1 and len(self.bounds) > 2 and torch.is_grad_enabled():
            scores = list(ScoresOfRows.apply(self.tables[0], self.bias, bounds, *projected))  # type: ignore[no-untyped-call]
        else:
            sizes = [b - a for a, b in pairwise(bounds)]
            tables = self.tables[0].split(sizes) if len(self.tables) == 1 else self.tables
            scores = [linear(h, *x) for h, *x in zip(projected, tables, self.bias.split(sizes), strict=True)]
        if len(self.bounds) > 2:
            clusters = F.linear(projected[0], self.cluster_weight, self.cluster_bias)
            scores[0] = torch.cat([scores[0], clusters], -1)
        return [x if x.dtype == torch.float64 else x.float() for x in scores]

    def _project(self, i: int, hidden: Tensor) -> Tensor:
        projection = self.projections.get(str(i))
        return hidden if projection is None else F.linear(hidden, projection.t())


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise ValueError if a target on a CPU is out of range.

    On a GPU the check would wait for the device, and in a compiled graph it would break the graph;
    there torch's cross_entropy raises.
    """
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        low, high = int(targets.min()), int(targets.max())
        if high >= vocab_size or (low < 0 and bool(((targets < 0) & (targets != IGNORED)).any())):
            raise ValueError(
                f"targets must be from 0 to {vocab_size - 1}, or {IGNORED} to be ignored, got {low} to {high}"
            )


class ScoresOfRows(torch.autograd.Function):
    """Scores hidden_i @ table[bounds[i] : bounds[i + 1]]^T + bias[..] of all bins i of one table.

    With slices, autograd would allocate a gradient for each bin and then copy them into one of the
    whole table: most of a step's memory traffic if the vocabulary is large. This backward writes
    each bin's gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, bias: Tensor, bounds: tuple[int, ...], *hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute table [V, d], bias [V], hidden_i [N_i, d] -> scores_i [N_i, tokens of bin i]."""
        ctx.save_for_backward(table, bias, *hidden)
        ctx.bounds = bounds
        return tuple(
            F.linear(h, table[bounds[i] : bounds[i + 1]], bias[bounds[i] : bounds[i + 1]]) for i, h in enumerate(hidden)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        table, bias, *hidden = ctx.saved_tensors
        d_table, d_bias, d_hidden = torch.empty_like(table), torch.empty_like(bias), []
        for i, (grad, h) in enumerate(zip(grads, hidden, strict=True)):
            rows = slice(ctx.bounds[i], ctx.bounds[i + 1])
            weight = table[rows]
            if grad.dtype == table.dtype == h.dtype:
                torch.mm(grad.t(), h, out=d_table[rows])
            else:  # under autocast
                d_table[rows] = grad.t() @ h.to(grad.dtype)
                weight = weight.to(grad.dtype)
            d_bias[rows] = grad.sum(0)
            d_hidden.append((grad @ weight).to(h.dtype))
        return (d_table, d_bias, None, *d_hidden)


@torch.no_grad()
def resize_vocabulary(module: AdaptiveEmbedding | AdaptiveSoftmax, config: NetworkConfig, mean: bool) -> None:
    """Add tokens to the last bin, or remove tokens from its end.

    Args:
        config: the configuration with the new vocab_size, otherwise unchanged.
        mean: initialize new rows with the mean of the bin's embeddings and biases; if False, draw
            embeddings at random and set biases to zero.
    """
    first = config.bounds[-2]

    def resized(old: nn.Parameter, rows: int, skip: int, std: float) -> nn.Parameter:
        new = old.new_empty(rows, *old.shape[1:])
        kept = min(rows, old.size(0))
        new[:kept] = old[:kept]
        new[kept:] = old[skip:].mean(0) if mean else torch.zeros_like(new[kept:]).normal_(0.0, std)
        return nn.Parameter(new, old.requires_grad)

    tables = module.tables if isinstance(module, AdaptiveEmbedding) else module.own_tables
    if len(tables):
        rows = table_shapes(config)[-1][0]
        tables[-1] = resized(tables[-1], rows, first if len(tables) == 1 else 0, config.init_std)
    if isinstance(module, AdaptiveSoftmax):
        module.bias = resized(module.bias, config.vocab_size, first, 0.0)
    module.bounds = config.bounds


def init_parameters(model: nn.Module, config: NetworkConfig) -> None:
    """Draw all parameters of a model from torch's generator, as the released code does."""
    for module in model.modules():
        init_module(module, config)


def init_module(module: nn.Module, config: NetworkConfig) -> None:
    """Draw a module's own parameters, without its children's."""
    for name, p in module.named_parameters(recurse=False):
        if isinstance(module, nn.LayerNorm) and name == "weight":
            assert isinstance(config, ModelConfig)
            nn.init.normal_(p, 1.0, config.norm_std)
        elif p.dim() == 1 or name == "distance_bias":
            nn.init.zeros_(p)
        else:  # a ParameterDict holds the projections of the embeddings
            nn.init.normal_(p, 0.0, config.proj_init_std if isinstance(module, nn.ParameterDict) else config.init_std)
