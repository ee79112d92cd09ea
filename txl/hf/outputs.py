"""Outputs of the models, and the cache of keys and values for `generate()` that they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from txl.model.transformer import Trunk
from txl_kernels import KeyValueCache, RelAttention
from txl_kernels.cache import unchanged_on_error


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """Return the one that is given of two names of the same argument; raise ValueError for both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values, which is its older name")
    return past_key_values if cache is None else cache


class TransfoXLCache:
    """The last mem_len keys and values of each layer, preallocated: time and memory per token do
    not grow with the text.

    Pass it as `cache` or by the older name `past_key_values`; `generate()` makes its own.

    Attributes:
        layers: one `KeyValueCache` for each layer.
        max_segment: maximum number of tokens of one kernel call; longer inputs are read in several.
            512 unless given, or fewer where a batch would take more than 1 GiB
            (`ModelConfig.cached_segment`).
    """

    # attributes that generate() reads from a cache
    is_compileable = False
    is_croppable = False

    def __init__(self, trunk: Trunk, batch: int, max_segment: int | None = None) -> None:
        """Make a cache at the start of a text: empty, or with mem_len zero states
        (`config.initial_memory`)."""
        max_segment = trunk.config.cached_segment(batch) if max_segment is None else max_segment
        self.max_segment, self._seen = max_segment, 0
        self.layers: list[KeyValueCache] = []
        with torch.no_grad():
            for block in trunk.layers:
                assert isinstance(block.attention, RelAttention)
                self.layers.append(block.attention.new_cache(batch, trunk.config.mem_len, max_segment))
            trunk.begin(self.layers, trunk.initial_memory(batch))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether its attention is linear (always False)."""
        return [False] * len(self)

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """A context that restores the cache if its body raises. After a call of several segments it
        cannot be restored, and raises RuntimeError from then on."""
        seen = self._seen
        with unchanged_on_error(self.layers):
            try:
                yield
            except BaseException:
                self._seen = seen
                raise

    def saw(self, count: int) -> None:
        """Add to the number of tokens read."""
        self._seen += count

    def pad(self, left: Tensor) -> None:
        """Hide padding: batch row n begins with left[n] tokens of padding, int64 [B].

        Raises:
            ValueError: tokens have been read already, or the padding is longer than max_segment.
        """
        longest = int(left.max())
        if self._seen:
            raise ValueError("attention_mask must be of ones with a cache that has read tokens")
        if longest > self.max_segment:
            raise ValueError(
                f"attention_mask must pad a text with at most the {self.max_segment} tokens of the cache's max_segment, "
                f"got {longest}"
            )
        for cache in self.layers:
            cache.hide(left)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including those no longer in the cache."""
        return self._seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Permute the batch rows into the order of the beams, beam_idx [B]."""
        for cache in self.layers:
            cache.reorder(beam_idx.long())


@dataclass
class TransfoXLModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLModel`.

    Attributes:
        last_hidden_state: [B, L, d_model].
        mems: the memory for the next segment, [M, B, d_model] for each layer; None with a cache or
            padding.
        cache: the cache that was given, with this segment added; also available as
            `past_key_values`.
        hidden_states: [B, L, d_model], the input of each layer, then the output of the last.
        attentions: [B, H, L, M + L] for each layer.
    """

    last_hidden_state: Tensor | None = None
    mems: list[Tensor] | None = None
    cache: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> TransfoXLCache | None:
        return self.cache


@dataclass
class TransfoXLLMHeadModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLLMHeadModel`; the rest as in `TransfoXLModelOutput`.

    Attributes:
        loss: mean loss of the labels other than -100.
        losses: [B, L - 1], in order of positions (transformers' own class ordered them by bin); 0
            where the label is -100.
        logits: log-probabilities [B, L, vocab_size]; None with labels. Also available as
            `prediction_scores`, the old name.
    """

    loss: Tensor | None = None
    losses: Tensor | None = None
    logits: Tensor | None = None
    mems: list[Tensor] | None = None
    cache: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> TransfoXLCache | None:
        return self.cache

    @property
    def prediction_scores(self) -> Tensor | None:
        return self.logits
