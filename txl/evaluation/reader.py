"""What reads a text with a model, segment by segment, at constant cost."""

import abc

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model import Network
from txl.model.config import ModelConfig


class Reader(abc.ABC):
    """Goes through `batch` texts side by side; parameters must not change while it lives.

    Args:
        model: switched to evaluation mode.
        batch: texts run side by side.
        max_segment: most tokens of one call.
    """

    def __init__(self, model: Network, batch: int, max_segment: int) -> None:
        if batch < 1 or max_segment < 1:
            raise TxlError(f"batch and max_segment must be >= 1, got {batch} and {max_segment}")
        self.model = model.eval()
        self.batch, self.max_segment = batch, max_segment

    @abc.abstractmethod
    def reset(self) -> None:
        """Back to the start of a text."""

    @abc.abstractmethod
    def hidden(self, tokens: Tensor) -> Tensor:
        """Advances by tokens [B, L <= max_segment].

        Returns: what the softmax takes, [B, L, d_model].
        """

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Advances by tokens [B, L <= max_segment].

        Returns: logits [B, L, vocab_size] of the tokens that follow.
        """
        return self.model.logits(self.hidden(tokens))

    @torch.inference_mode()
    def nll(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Advances by tokens [B, L <= max_segment]; the losses [B, L] of targets (see `nll` of the
        softmax)."""
        return self.model.softmax.nll(self.hidden(tokens), targets)

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

    def _check_segment(self, tokens: Tensor) -> None:
        """Raises TxlError if there are more than max_segment."""
        if tokens.size(1) > self.max_segment:
            raise TxlError(f"a segment has at most max_segment = {self.max_segment} tokens, got {tokens.size(1)}")


def check_attn_len(attn_len: int) -> None:
    """Raises TxlError if it is below 1."""
    if attn_len < 1:
        raise TxlError(f"the attention length must be >= 1 (a token sees at least itself), got {attn_len}")


def check_clamp_len(model: Network, clamp_len: int | None) -> None:
    """Raises TxlError if it is below 1, or the model has no sinusoids of distances to clamp."""
    if clamp_len is None:
        return
    if clamp_len < 1:
        raise TxlError(f"clamp_len must be None or >= 1, got {clamp_len}")
    if not isinstance(model.config, ModelConfig):
        raise TxlError(f"clamp_len is for Transformers, not for a network of kind {model.config.network!r}")
    if model.config.encoding != "relative":
        raise TxlError(f"clamp_len is for encoding 'relative', not {model.config.encoding!r}")
