"""Zipformer's attention weights (Yao et al. 2023), in icefall and its copies: scores of queries and
keys plus scores of position queries of width 4, without a scale.

The layer passes the weights to three modules, which multiply them by values. The accelerated module
returns an object in their place (`PairWeights`), so that these modules call the kernels. Random
draws are the original's, in the same order, of Python's generator and of torch's.
"""

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.adapters.pair_weights import PairWeights, Scores, Seen
from txl_kernels.integrations.attention import bounds_or_reason, crop, is_zero, project_table
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of
from txl_kernels.integrations.streaming import cached
from txl_kernels.linear import has_hooks

MAX_PAIRS = 2**22  # pairs of a block of queries, where something is computed block by block
LIMIT = 25.0  # of scores, beyond which training adds a penalty
HIDDEN = -1000  # the score of pairs that masks hide


class ZipEnhancer(Accelerated):
    """The module without penalties and diagnostics, as in ZipEnhancer's package.

    Attributes:
        penalizes: whether the original, in one call of ten in training, adds a penalty of large
            scores to the gradients.
        logs: whether the original, in one call of a thousand in evaluation, logs the entropy of the
            weights.
    """

    penalizes, logs = False, False
    needs = ("in_proj", "linear_pos", "copy_query", "copy_pos_query", "whiten_keys", "balance_keys", "pos_emb_skip_rate",
             "query_head_dim", "pos_head_dim")  # fmt: skip

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table = inputs.table(width_of(module.linear_pos))
        values = inputs.normal(module.num_heads, inputs.B, inputs.T, 5)
        padding = None if seen is None else inputs.padding(seen)
        hidden = None if seen is None else ~seen

        def call(m: Any, x: Tensor) -> Tensor:
            state = random.getstate()
            weights = m(x.transpose(0, 1), table, padding, hidden)
            random.setstate(state)
            return torch.matmul(weights, values)

        return inputs.frames(width_of(module.in_proj)), call

    def forward(
        self: Any, x: Tensor, pos_emb: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> PairWeights | Tensor | str:
        why = "a hook on its calls, which may read the weights" if has_hooks(self) else self.why_weights_needed()
        if self.training and self.dropout != 0:
            why = why or "dropout of weights that several modules share"
        seen = self._seen(why, x, pos_emb, x.size(0), key_padding_mask, attn_mask)
        if isinstance(seen, str):
            return seen
        q, k, p = self._split(self.in_proj(x))
        q, k, p = self.copy_query(q), self.whiten_keys(self.balance_keys(k)), self.copy_pos_query(p)
        positions = not self.training or random.random() >= float(self.pos_emb_skip_rate)
        penalty = self.training and self.penalizes and random.random() < 0.1
        # Pairs outside a window get penalties, too, as those that masks hide.
        scores = self._scores(q, k, p, pos_emb if positions else None, seen, whole_table=penalty)
        masks = (key_padding_mask, attn_mask)
        weights: PairWeights | Tensor = self._stand_in(scores, masks)
        if penalty:
            if _are_small(scores):
                self._penalized(scores.of_pairs(slice(1))[:1, :1, :, :1])  # for its random draws
            else:
                self.count_fallback("a penalty on large scores, which training adds to some calls")
                weights = self._weights(scores, masks, self._penalized)
        drawn = self.logs and (self.training or not torch.compiler.is_compiling())  # random draws break a graph
        if drawn and random.random() < 0.001 and not self.training:
            self._log_entropy(scores, masks)
        return weights

    def _seen(
        self: Any, why: str | None, x: Tensor, pos_emb: Tensor, keys: int, padding: Tensor | None, hidden: Tensor | None
    ) -> Seen | str:
        """Return the keys that queries see, or the reason why the original must answer: `why`, if
        it is not None.

        padding: bool [B, keys], True for keys that no query sees. hidden: bool [L, keys] or [B, L,
        keys], True for pairs that do not count.
        """
        length, batch = x.size(0), x.size(1)
        why = why or self.why_not_kernel(x)
        if pos_emb.dim() != 3 or pos_emb.size(0) not in (1, batch) or pos_emb.size(1) != length + keys - 1:
            why = "encodings of other positions"
        if padding is not None and (padding.dtype != torch.bool or padding.shape != (batch, keys)):
            why = "a padding mask of another dtype or shape"
        if hidden is not None and (
            hidden.dtype != torch.bool or hidden.dim() not in (2, 3) or hidden.shape[-2:] != (length, keys)
        ):
            why = "an attention mask of another dtype or shape"
        found = []
        for kind, mask, seen in (("padding", padding, is_zero), ("mask", hidden, _seen_pairs)):
            bounds = bounds_or_reason(why, mask, seen, keys=keys, kind=kind)
            if isinstance(bounds, str):
                return bounds
            found += [(start, end) for start, end in [bounds] if start is not None and end is not None]
        if not found:
            return Seen()
        start, end = found[0]
        for other_start, other_end in found[1:]:
            start, end = torch.maximum(start, other_start), torch.minimum(end, other_end)
        alone = start >= end
        return Seen(start.masked_fill(alone, 0), end.masked_fill(alone, keys), alone)

    def _split(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and position queries of projected frames [L, B, ..]."""
        width = self.query_head_dim * self.num_heads
        return x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]

    def _scores(
        self: Any, q: Tensor, k: Tensor, p: Tensor, pos_emb: Tensor | None, seen: Seen, whole_table: bool = False
    ) -> Scores:
        """Return the scores of projections [L or S, B, H * width] and encodings [1 or B, L + S - 1,
        d], farthest past first, or None for scores without positions.

        whole_table: True for a table that is not limited to a window.
        """
        q, k, p = (x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, p))
        window = self.setting("window")
        if pos_emb is None:
            return Scores(q, k, None, None, 0, seen, window)
        rows, past = crop(None if whole_table else window, pos_emb, k.size(2) - 1)
        (r,) = cached(
            self, "r", (self.linear_pos,), rows, q.size(2),
            lambda: (project_table(self.linear_pos, rows, self.num_heads),),
        )  # fmt: skip
        return Scores(q, k, p, r, past, seen, window)

    def _stand_in(self: Any, scores: Scores, masks: Any) -> PairWeights:
        def compute(scores: Scores) -> Tensor:
            self.count_fallback("attention weights asked for")
            return self._weights(scores, masks)  # type: ignore[no-any-return]

        return PairWeights(scores.with_equal_weights(), compute)

    def _weights(
        self: Any, scores: Scores, masks: tuple[Tensor | None, Tensor | None],
        change: Callable[[Tensor], Tensor] | None = None, queries: slice = slice(None),
    ) -> Tensor:  # fmt: skip
        """Return the weights [H, B, L, S] of some queries, as the original computes them, within
        the window.

        masks: the padding mask and the attention mask. change: of the scores before masks.
        """
        padding, hidden = masks
        pairs = scores.of_pairs(queries)
        pairs = pairs if change is None else change(pairs)
        if hidden is not None:
            pairs = pairs.masked_fill(hidden[..., queries, :], HIDDEN)
        if padding is not None:
            pairs = pairs.masked_fill(padding.unsqueeze(1), HIDDEN)
        outside = scores.outside_window(queries)
        if outside is not None:
            pairs = pairs.masked_fill(outside, -torch.inf)
        return self.beside.softmax(pairs, dim=-1)  # type: ignore[no-any-return]

    def _penalized(self: Any, pairs: Tensor) -> Tensor:
        return self.beside.penalize_abs_values_gt(pairs, limit=LIMIT, penalty=1.0e-04, name=self.name)  # type: ignore[no-any-return]

    def _log_entropy(self: Any, scores: Scores, masks: Any) -> None:
        """Log the entropy of the weights of each head as the original's `_print_attn_entropy` does,
        from weights of some queries at a time."""
        names = self._print_attn_entropy.__code__.co_names
        level = logging.DEBUG if "debug" in names else logging.INFO
        if not logging.getLogger().isEnabledFor(level):
            return
        batch, heads, length, _ = scores.q.shape
        total = torch.zeros(heads, device=scores.q.device)
        with torch.no_grad():
            for queries in _blocks(scores):
                weights = self._weights(scores, masks, queries=queries).float()
                total -= ((weights + 1.0e-20).log() * weights).sum(dim=(1, 2, 3))
        logging.log(level, f"name={self.name}, attn_weights_entropy = {total / (batch * length)}")


class ModelScope(ZipEnhancer):
    """ZipEnhancer's module in ModelScope, with penalties."""

    penalizes = True


class Zipformer(ModelScope):
    """The module of icefall and of the zipformer package, with diagnostics, and with streaming."""

    logs = True

    def streaming_forward(
        self: Any, x: Tensor, pos_emb: Tensor, cached_key: Tensor, left_context_len: int, key_padding_mask: Tensor
    ) -> tuple[PairWeights | Tensor, Tensor]:
        """Return the weights of a chunk of frames and the new cache of keys."""
        seen = self._seen(None, x, pos_emb, left_context_len + x.size(0), key_padding_mask, None)
        if cached_key.size(0) != left_context_len or left_context_len == 0:
            seen = "a cache of another length"
        if isinstance(seen, str):
            self.check_fallback(seen)
            self.count_fallback(seen)
            return self.original.streaming_forward(  # type: ignore[no-any-return]
                self, x, pos_emb, cached_key, left_context_len, key_padding_mask
            )
        q, k, p = self._split(self.in_proj(x))
        k = torch.cat([cached_key, k], dim=0)
        return self._stand_in(self._scores(q, k, p, pos_emb, seen), (key_padding_mask, None)), k[-left_context_len:]


def _blocks(scores: Scores) -> Iterator[slice]:
    """Yield slices of queries with at most MAX_PAIRS pairs each, or of one query."""
    batch, heads, length, _ = scores.q.shape
    size = max(MAX_PAIRS // (batch * heads * scores.k.size(2)), 1)
    for first in range(0, length, size):
        yield slice(first, first + size)


@torch.no_grad()
def _are_small(scores: Scores) -> bool:
    """Whether all scores are within LIMIT, whatever their rounding, so that the penalty is 0.
    Synchronizes with the device."""
    if torch.compiler.is_compiling():
        return False
    return all(bool(scores.of_pairs(queries).abs().amax() < 0.98 * LIMIT) for queries in _blocks(scores))


def _seen_pairs(hidden: Tensor) -> Tensor:
    """Return the keys that queries see, bool [1 or B, L, S], of a mask [L, S] or [B, L, S]."""
    return is_zero(hidden if hidden.dim() == 3 else hidden.unsqueeze(0))


PEERS = (
    Peer("Zipformer", "zipformer.modules.zipformer.RelPositionMultiheadAttentionWeights", Zipformer, "zipformer",
         {"0.1.3": "5717057418f5cad3", "icefall of June 2023": "913fcc29b2159cb5", "icefall of 2023": "08d41942b8682015",
          "icefall of 2024": "46dcc2655eb31002", "icefall of December 2024": "4bc9205a95a3f263",
          "icefall of 2025": "fcc511b5a5806776", "icefall of 2026": "d516e4ea99f42947",
          "icefall's recipe for SSL": "c086d4a121c19a27", "ZipVoice of December 2025": "ec8ec58ecfc96e78"}),
    Peer("ZipEnhancer", "zipenhancer.models.layers.zipformer.RelPositionMultiheadAttentionWeights", ZipEnhancer,
         "zipenhancer", {"0.3.2": "590dfac9eef5f127"}),
    Peer("ModelScopeZipEnhancer",
         "modelscope.models.audio.ans.zipenhancer_layers.zipformer.RelPositionMultiheadAttentionWeights", ModelScope,
         "modelscope", {"1.20.1": "f4c385efad65ac74", "1.40.2": "679b09a0cbd23fb3"}),
)  # fmt: skip
