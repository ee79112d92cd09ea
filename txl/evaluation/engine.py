"""Evaluation and generation with cached keys and values.

Memory and time a token are constant however long the text.
"""

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model.transformer import TransformerXL


class Engine:
    """Runs a model over a text by segments; parameters must not change while it lives.

    Every token attends to exactly the last `attn_len` positions, itself included (fewer at the
    start), however the text is cut into segments. Exactly what recomputing the keys from
    hidden-state memory gives (paper, section 3.2).

    Args:
        model: switched to evaluation mode.
        batch: texts run side by side.
        attn_len: keys a token sees.
        max_segment: most tokens of one call.
        clamp_len: None for the model's own.
    """

    def __init__(
        self, model: TransformerXL, batch: int, attn_len: int, max_segment: int, clamp_len: int | None = None
    ) -> None:
        if attn_len < 1:
            raise TxlError(f"the attention length must be >= 1 (a token sees at least itself), got {attn_len}")
        if batch < 1 or max_segment < 1:
            raise TxlError(f"batch and max_segment must be >= 1, got {batch} and {max_segment}")
        self.model = model.eval()
        self.max_segment = max_segment
        self.caches = [
            block.attention.new_cache(batch, attn_len - 1, max_segment, window=attn_len, clamp_len=clamp_len)
            for block in model.layers
        ]
        self.reset()

    @torch.inference_mode()
    def reset(self) -> None:
        """Back to the start of a text."""
        zeros = self.model.initial_memory(self.caches[0].batch)
        for i, (block, cache) in enumerate(zip(self.model.layers, self.caches, strict=True)):
            cache.clear()
            if zeros is not None:
                block.attention.fill_cache(cache, block.attention_input(zeros[i]))

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Advances by tokens [B, L <= max_segment]; the last layer's states [B, L, d_model]."""
        hidden = self.model.embed(tokens)
        for block, cache in zip(self.model.layers, self.caches, strict=True):
            attended = block.attention(block.attention_input(hidden), cache=cache)
            hidden = block.after_attention(hidden, attended)
        return hidden

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Advances by tokens [B, L <= max_segment].

        Returns: logits [B, L, vocab_size] of the tokens that follow.
        """
        return self.model.logits(self.hidden(tokens))

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> Tensor:
        """Advances by tokens [B, any L >= 1] in segments.

        Returns: logits [B, vocab_size] of the token after the last.
        """
        if tokens.size(1) == 0:
            raise TxlError("the prompt is empty: at least one token is needed to predict the next")
        for part in tokens.split(self.max_segment, 1):
            last = self.hidden(part)[:, -1:]
        return self.model.logits(last)[:, 0]
