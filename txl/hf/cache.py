"""What `generate()` keeps between tokens: keys and values, of constant size."""

import torch
from torch import Tensor

from txl.model.transformer import Trunk
from txl_kernels import KeyValueCache, RelAttention


class TransfoXLCache:
    """The last mem_len keys and values of each layer, preallocated: time and memory a token do not
    grow with the text.

    Passed as `past_key_values`; `generate()` makes its own.

    Attributes:
        layers: a cache a layer.
        max_segment: most tokens of one call; more are read in several.
    """

    is_compileable = False

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

    def saw(self, count: int) -> None:
        """Counts tokens read."""
        self._seen += count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, those that were dropped included."""
        return self._seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order of the beams."""
        for cache in self.layers:
            cache.reorder(beam_idx.long())
