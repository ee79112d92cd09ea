"""The cache of `generate()`."""

from typing import Any

import torch
from torch import Tensor

from txl.model.transformer import Trunk
from txl_kernels import KeyValueCache, RelAttention


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The one given of two arguments that mean the same."""
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values, which is its older name")
    return past_key_values if cache is None else cache


class TransfoXLCache:
    """The last mem_len keys and values of each layer, preallocated: time and memory a token do not
    grow with the text.

    Passed as `cache`, or by its older name `past_key_values`; `generate()` makes its own.

    Attributes:
        layers: a cache a layer.
        max_segment: most tokens of one call; more are read in several.
    """

    # What generate() asks of a cache.
    is_compileable = False
    is_croppable = False

    def __init__(self, trunk: Trunk, batch: int, max_segment: int = 128) -> None:
        """At the start of a text: no memory, or zeros of mem_len (`config.initial_memory`)."""
        self.max_segment, self._seen = max_segment, 0
        self.layers: list[KeyValueCache] = []
        with torch.no_grad():
            for block in trunk.layers:
                assert isinstance(block.attention, RelAttention)
                self.layers.append(block.attention.new_cache(batch, trunk.config.mem_len, max_segment))
            trunk.begin(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether its attention is linear."""
        return [False] * len(self)

    def saw(self, count: int) -> None:
        """Counts tokens read."""
        self._seen += count

    def pad(self, left: Tensor) -> None:
        """Begins row n of the texts after left[n] tokens of padding, int64 [B].

        Raises:
            ValueError: tokens have been read, or the padding is longer than a segment.
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
        """Tokens read so far, those that were dropped included."""
        return self._seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts rows into the order of the beams."""
        for cache in self.layers:
            cache.reorder(beam_idx.long())
