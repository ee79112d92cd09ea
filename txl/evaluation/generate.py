"""Sampling from a model token by token, and conversion of the tokens to text, up to a stop
string."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Reader
from txl.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sampling:
    """Options of drawing a token from the logits.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: draw from the k most likely tokens only; 0 for all.
        top_p: draw from the fewest most likely tokens whose probabilities sum to p; 1 for all.
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
        """Draw tokens [B] from logits [B, vocab_size]; raise TxlError if the largest are not
        finite."""
        if not logits.amax(-1).isfinite().all():
            raise TxlError("the model's predictions are not finite: its parameters are damaged, or it diverged")
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.double()  # float64 can represent a temperature of 1e-300
        # The largest becomes 0, so dividing by a very low temperature cannot overflow upwards.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits.size(-1):
            kept = logits.topk(self.top_k).indices  # by index, so that equal logits do not let more than k through
            logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            p = ordered.softmax(-1)
            beyond = p.cumsum(-1) - p >= self.top_p  # keeps the first token always
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def generate(
    reader: Reader, prompt: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Yield `count` drawn tokens [B], each as soon as it is drawn.

    prompt: [B, L >= 1]; the reader is reset before it reads it.
    """
    reader.reset()
    logits = reader.feed(prompt)
    for n in range(count):
        token = sampling.draw(logits, generator)
        yield token
        if n + 1 < count:
            logits = reader.feed(token.unsqueeze(1))


def encoded(text: str | bytes) -> bytes:
    """Return a text as bytes; those of a command line that are not UTF-8 are kept."""
    return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text


def text_of(
    drawn: Iterator[Tensor], vocabulary: Vocabulary, before: int, apart: bool, stop: bytes = b""
) -> Iterator[bytes]:
    """Yield the bytes that drawn tokens [1] add to a text, up to a stop string, which is left out.

    Bytes that may begin the stop string are held back until later tokens decide. No token is drawn
    after the stop string.

    Args:
        before: the token that precedes the first drawn one.
        apart: whether the text before ends in white space, so that a first word needs no space.
        stop: empty for no stop string.
    """
    held, decode = b"", vocabulary.decode
    apart = apart and vocabulary.unit == "words"
    for each in drawn:
        token = int(each)
        piece = decode([before, token])[len(decode([before])) :]
        held += piece.lstrip(b" ") if apart else piece
        before, apart = token, False
        end = held.find(stop) if stop else -1
        if end >= 0:
            if end:
                yield held[:end]
            return
        kept = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if stop.startswith(held[-n:])), 0)
        shown, held = held[: len(held) - kept], held[len(held) - kept :]
        if shown:
            yield shown
    if held:
        yield held
