"""Sampling from a model, one token at a time, at constant cost a token."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.evaluate import default_method
from txl.evaluation.reader import Reader
from txl.model import Network
from txl.model.transformer import TransformerXL


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits.

    Attributes:
        temperature: 0 takes the likeliest token; above 0 divides the logits.
        top_k: only the k likeliest; 0 for all.
        top_p: only the likeliest whose probabilities sum to p; 1 for all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise TxlError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise TxlError(f"top-k must be >= 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise TxlError(f"top-p must be in (0, 1], got {self.top_p}")

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Tokens [B] from logits [B, vocab_size]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.double()  # in which even a temperature of 1e-300 is one
        if not logits.amax(-1).isfinite().all():
            raise TxlError("the model's predictions are not finite: its parameters are damaged, or it diverged")
        # The largest is 0, however low the temperature.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits.size(-1):
            kept = logits.topk(self.top_k).indices  # by place: of equal logits no more than k get through
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            p = ordered.softmax(-1)
            beyond = p.cumsum(-1) - p >= self.top_p  # the first token is always kept
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def generate(
    reader: Reader, prompt: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yields `count` tokens [B], each as soon as it is drawn.

    prompt: [B, L >= 1]; the reader is reset first.
    """
    reader.reset()
    logits = reader.feed(prompt)
    for n in range(count):
        token = sampling.draw(logits, generator)
        yield token
        if n + 1 < count:
            logits = reader.feed(token.unsqueeze(1))


def starting_with(model: Network, zeros: bool | None) -> Network:
    """The model, or one of the same parameters whose texts begin otherwise.

    zeros: True for zero states before a text, which are attended; False for nothing; None for the
        model's own (`ModelConfig.initial_memory`).

    Raises:
        TxlError: zeros, and the model has no recurrence with relative positions, so that no states
            precede a text.
    """
    if zeros is None:
        return model
    if not isinstance(model, TransformerXL) or default_method(model) != "cached":
        if zeros:
            raise TxlError("zeros are for a Transformer with recurrence and relative positions, which this is not")
        return model
    other = copy.copy(model)  # shares the parameters
    other.config = replace(model.config, initial_memory="zeros" if zeros else "empty")
    return other
