"""Sampling from a model, one token at a time, at constant cost a token, and the text that it gives:
piece by piece, up to a stop string."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Reader
from txl.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sampling:
    """The options of drawing a token from the logits.

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


def stop_bytes(stop: str | bytes | None) -> bytes:
    """A stop string as bytes; empty for None.

    Raises:
        TxlError: it is empty, cannot be encoded, or is no string.
    """
    if stop is None:
        return b""
    if not isinstance(stop, (str, bytes)) or not stop:
        raise TxlError(f"stop must be a string of at least one character, got {stop!r}")
    return encoded(stop, f"stop {stop!r}")


def encoded(text: str | bytes, name: str) -> bytes:
    """A text as bytes; TxlError, which names it, if it cannot be encoded."""
    try:
        return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise TxlError(f"{name} cannot be encoded: {error}") from error


def text_of(
    drawn: Iterator[Tensor], vocabulary: Vocabulary, before: int, apart: bool, stop: bytes = b""
) -> Iterator[bytes]:
    """Yield the bytes that tokens [1] add to a text, up to a stop string, which is left out.

    Bytes that may begin the stop string are held back until the next tokens decide. No token is
    drawn after it.

    Args:
        before: the token that precedes the first.
        apart: the text before ends in white space, so that no space is wanted before a word.
        stop: as `stop_bytes` gives it; empty for none.
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
