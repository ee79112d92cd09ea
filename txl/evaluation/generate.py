"""Sampling from a model, one token at a time, at constant cost a token, and the text that it gives:
piece by piece, up to a stop string."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.evaluation.readers import Reader
from txl.text.vocabulary import Vocabulary

Stop = str | bytes | Sequence[str | bytes]


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


def stop_strings(stop: Stop) -> tuple[bytes, ...]:
    """One or more strings, or none, as bytes.

    Raises:
        TxlError: one is empty, cannot be encoded, or is no string.
    """
    if not isinstance(stop, Sequence):
        raise TxlError(f"stop must be a string or a sequence of them, got {stop!r}")
    stops = [stop] if isinstance(stop, (str, bytes)) else stop
    for each in stops:
        if not isinstance(each, (str, bytes)) or not each:
            raise TxlError(f"stop must hold strings of at least one character, got {each!r}")
    return tuple(encoded(each, f"stop {each!r}") for each in stops)


def encoded(text: str | bytes, name: str) -> bytes:
    """A text as bytes; TxlError, which names it, if it cannot be encoded."""
    try:
        return text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise TxlError(f"{name} cannot be encoded: {error}") from error


class UpToStop:
    """Lets a text through up to the first of some stop strings, which is left out.

    What may be the beginning of one is held back until the text tells. Of several the one that is
    complete first counts, and of those that end together the longest: where the text is cut into
    tokens makes no difference.

    Attributes:
        stopped: a stop string has come; nothing is let through any more.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops, self._held, self.stopped = stops, b"", False

    def add(self, piece: bytes) -> bytes:
        """What is certain to be part of the text now."""
        if self.stopped:
            return b""
        text, self._held = self._held + piece, b""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)[1]]
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                self._held = text[-n:]
                return text[:-n]
        return text

    def rest(self) -> bytes:
        """What is held back still, when the text is at its end."""
        held, self._held = self._held, b""
        return held


class GrowingText:
    """What tokens add to a text, up to a stop string.

    Args:
        before: the token that precedes the first.
        apart: what precedes ends in white space, so that no space is wanted before a word.
        stops: as `stop_strings` gives them.
    """

    def __init__(self, vocabulary: Vocabulary, before: int, apart: bool, stops: Sequence[bytes]) -> None:
        self._vocabulary, self._before = vocabulary, before
        self._apart = apart and vocabulary.unit == "words"
        self._shown = UpToStop(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._shown.stopped

    def add(self, token: int) -> bytes:
        """The bytes that can be shown after this token: none while they may begin a stop string."""
        decode = self._vocabulary.decode
        piece = decode([self._before, token])[len(decode([self._before])) :]
        if self._apart:
            piece = piece.lstrip(b" ")
        self._before, self._apart = token, False
        return self._shown.add(piece)

    def rest(self) -> bytes:
        """What was held back, when no more tokens come."""
        return self._shown.rest()


def pieces(drawn: Iterator[Tensor], text: GrowingText) -> Iterator[bytes]:
    """The bytes of one text from its tokens [1], as soon as they can be shown; draws no token after
    a stop string."""
    for token in drawn:
        if piece := text.add(int(token)):
            yield piece
        if text.stopped:
            return
    if rest := text.rest():
        yield rest


def by_length(
    prompts: Sequence[Tensor], texts: Sequence[GrowingText], draw: Callable[[Tensor], Iterator[Tensor]]
) -> list[bytes]:
    """Texts after prompts [n] of any lengths, those of one length side by side, the shortest first;
    each up to its own end, and no more is drawn when all of a length have ended.

    draw: gives the tokens [B] that follow prompts [B, n].
    """
    shown = [b""] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        for tokens in draw(torch.stack([prompts[n] for n in places])):
            for n, token in zip(places, tokens.tolist(), strict=True):
                if not texts[n].stopped:
                    shown[n] += texts[n].add(token)
            if all(texts[n].stopped for n in places):
                break
    return [before + text.rest() for before, text in zip(shown, texts, strict=True)]
