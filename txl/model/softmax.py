"""Adaptive softmax (Grave et al. 2017): rare tokens by way of their bin."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.model.bin_scores import ScoresOfRows
from txl.model.embedding import AdaptiveEmbedding, needs_projection, table_shapes
from txl.model.network_config import NetworkConfig

IGNORED = -100  # a target that is not scored


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of the next token, of any vocabulary size.

    The head is log_softmax([E_0; C] P'_0^T h + [b_0; b_C]); a token w of bin i >= 1, whose first
    token is l_i, has log-probability head[c_1 + i - 1] + log_softmax(E_i P'_i^T h + b_i)[w - l_i].

    Attributes:
        own_tables, own_projections: E_i and P'_i as in `AdaptiveEmbedding`, those that are not the
            embedding's; with div_val 1 there is a projection for each bin.
        bias: [vocab_size], b_0, b_1, ..
        cluster_weight, cluster_bias: C [bins - 1, d_embed] and b_C [bins - 1], if bins > 1.
    """

    def __init__(self, config: NetworkConfig, embedding: AdaptiveEmbedding | None) -> None:
        """embedding: whose tables are used where config ties them; None for none."""
        super().__init__()
        self.bins = config.bins
        self.div_val = config.div_val
        shared = embedding if config.tie_weight else None
        # In a tuple: the embedding registers them, and tied they stay, whatever becomes of tensors.
        self._shared: tuple[AdaptiveEmbedding, ...] = () if shared is None else (shared,)
        tables = [] if shared is not None else [torch.empty(shape) for shape in table_shapes(config)]
        self.own_tables = nn.ParameterList(tables)
        self.own_projections = nn.ParameterDict()
        self._tied_projections: list[str] = []
        for i, width in enumerate(self.bins.widths):
            if needs_projection(config, width):
                if shared is not None and config.ties_projection(i):
                    self._tied_projections.append(str(i))
                else:
                    self.own_projections[str(i)] = nn.Parameter(torch.empty(config.d_model, width))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if len(self.bins) > 1:
            self.cluster_weight = nn.Parameter(torch.empty(len(self.bins) - 1, self.bins.widths[0]))
            self.cluster_bias = nn.Parameter(torch.zeros(len(self.bins) - 1))

    @property
    def tables(self) -> nn.ParameterList:
        """E_i, wherever they are registered."""
        return self._shared[0].tables if self._shared else self.own_tables

    @property
    def projections(self) -> dict[str, nn.Parameter]:
        """P'_i, wherever they are registered, under "i"."""
        found = dict(self.own_projections.items())
        for i in self._tied_projections:
            found[i] = self._shared[0].projections["0" if self.div_val == 1 else i]
        return found

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, in nats.

        Only the head and the bins that hold targets are computed, each for its own rows.

        Args:
            hidden: [B, L, d_model].
            targets: [B, L], integers below vocab_size, or -100 where nothing is scored.

        Returns:
            [B, L] in order of the targets, float32 (float64 of float64 states); 0 where ignored.

        Raises:
            ValueError: targets is of another shape; on a CPU also: a target is out of range
                (IndexError by torch where compiled).
        """
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(f"targets must be {list(hidden.shape[:-1])}, like hidden, got {list(targets.shape)}")
        # Reading values would break a compiled graph, where torch's cross_entropy refuses them.
        if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
            low, high = int(targets.min()), int(targets.max())
            if high >= self.bins.vocab_size or (low < 0 and bool(((targets < 0) & (targets != IGNORED)).any())):
                raise ValueError(
                    f"targets must be from 0 to {self.bins.vocab_size - 1}, or {IGNORED} to be ignored, got {low} to {high}"
                )
        flat, goal = hidden.flatten(0, -2), targets.flatten()
        first = self.bins.bounds[1]
        which = torch.zeros_like(goal)  # bin of each target; 0 for those ignored
        for cutoff in self.bins.cutoffs:
            which += goal >= cutoff
        column = torch.where(which == 0, goal, first + which - 1)
        # A bin without targets takes part too, so that every parameter gets a gradient.
        rows = [(which == i).nonzero().squeeze(1) for i in range(1, len(self.bins))]
        scores = self._scores([flat, *(flat[found] for found in rows)])
        nll = F.cross_entropy(scores[0], column, reduction="none", ignore_index=IGNORED)
        for i, found in enumerate(rows, 1):
            tail = F.cross_entropy(scores[i], goal[found] - self.bins.bounds[i], reduction="none")
            nll = nll.index_add(0, found, tail)
        return nll.view(targets.shape)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[.., d_model] -> log-probabilities [.., vocab_size]; float32 or float64."""
        flat = hidden.flatten(0, -2)
        scores = [x.log_softmax(-1) for x in self._scores([flat] * len(self.bins))]
        first = self.bins.bounds[1]
        tails = [scores[0][:, first + i - 1 : first + i] + scores[i] for i in range(1, len(self.bins))]
        return torch.cat([scores[0][:, :first], *tails], -1).view(*hidden.shape[:-1], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores whose softmax is the distribution, [.., vocab_size]: of one bin as they are, of
        several their log-probabilities."""
        if len(self.bins) > 1:
            return self.log_probs(hidden)
        return F.linear(self._project(0, hidden), self.tables[0], self.bias)

    def _scores(self, hidden: list[Tensor]) -> list[Tensor]:
        """Of states [N_i, d_model] a bin: head [N_0, c_1 + bins - 1], then tails [N_i, tokens of
        bin i]; float32 or float64."""
        bounds, projected = self.bins.bounds, [self._project(i, h) for i, h in enumerate(hidden)]
        if len(self.tables) == 1 < len(self.bins):
            scores = list(ScoresOfRows.apply(self.tables[0], self.bias, bounds, *projected))  # type: ignore[no-untyped-call]
        else:
            biases = self.bias.split([b - a for a, b in pairwise(bounds)])
            scores = [F.linear(h, *x) for h, *x in zip(projected, self.tables, biases, strict=True)]
        if len(self.bins) > 1:
            clusters = F.linear(projected[0], self.cluster_weight, self.cluster_bias)
            scores[0] = torch.cat([scores[0], clusters], -1)
        return [x if x.dtype == torch.float64 else x.float() for x in scores]

    def _project(self, i: int, hidden: Tensor) -> Tensor:
        projection = self.projections.get(str(i))
        return hidden if projection is None else F.linear(hidden, projection.t())
