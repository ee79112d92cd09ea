"""What reads a text with a model, segment by segment, at constant cost."""

import abc

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.model.transformer import TransformerXL


class Reader(abc.ABC):
    """Goes through `batch` texts side by side; parameters must not change while it lives.

    Args:
        model: switched to evaluation mode.
        batch: texts run side by side.
        max_segment: most tokens of one call.
    """

    def __init__(self, model: TransformerXL, batch: int, max_segment: int) -> None:
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
