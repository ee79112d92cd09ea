"""Evaluation and generation with cached keys and values.

Memory and time a token are constant however long the text.
"""

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.reader import Reader, check_attn_len, check_clamp_len
from txl.model.networks import Network, as_transformer
from txl_kernels.layer import SegmentAttention


class Engine(Reader):
    """Runs a model over a text by segments; parameters must not change while it lives.

    Every token attends to exactly the last `attn_len` positions, itself included (fewer at the
    start), however the text is cut into segments. Exactly what recomputing the keys from
    hidden-state memory gives (paper, section 3.2).

    Args:
        model: switched to evaluation mode; its positions must be relative ("relative" or Shaw's).
        batch: texts run side by side.
        attn_len: keys a token sees.
        max_segment: most tokens of one call.
        clamp_len: largest distance told apart; None for the model's own.

    Raises:
        TxlError: a size is below 1, or the model has absolute positions or no attention.
    """

    def __init__(
        self, model: Network, batch: int, attn_len: int, max_segment: int, clamp_len: int | None = None
    ) -> None:
        super().__init__(model, batch, max_segment)
        self._transformer = model = as_transformer(model, "a cache of keys")
        check_attn_len(attn_len)
        check_clamp_len(model, clamp_len)
        if model.config.absolute:
            raise TxlError(
                f"encoding {model.config.encoding!r} puts places into the hidden states, so keys cannot be cached: use "
                "a sliding window or segments"
            )
        self.attention: list[SegmentAttention] = [block.attention for block in model.layers]  # type: ignore[misc]
        self.caches = [
            attention.new_cache(batch, attn_len - 1, max_segment, window=attn_len, clamp_len=clamp_len)
            for attention in self.attention
        ]
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Back to the start of a text: no memory, or zeros of the engine's own length."""
        self._transformer.begin(self.caches)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        return self._transformer.read_cached(self._transformer.embed(tokens), self.caches)
