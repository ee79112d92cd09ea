"""From drawn tokens to the bytes of a text, one text at a time or several side by side."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from txl.evaluation.stopping import UpToStop
from txl.text.vocabulary import Vocabulary


class GrowingText:
    """What tokens add to a text, up to a stop string.

    Args:
        before: the token that precedes the first.
        apart: what precedes ends in white space, so that no space is wanted before a word.
        stops: as `txl.evaluation.stopping.stop_strings` gives them.
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


def pieces(
    drawn: Iterator[Tensor], text: GrowingText, progress: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """The bytes of one text from its tokens [1], as soon as they can be shown; draws no token after
    a stop string.

    progress: called with the number of tokens drawn so far.
    """
    for n, token in enumerate(drawn, 1):
        piece = text.add(int(token))
        if progress:
            progress(n)
        if piece:
            yield piece
        if text.stopped:
            return
    if rest := text.rest():
        yield rest


def together(drawn: Iterator[Tensor], texts: Sequence[GrowingText]) -> list[bytes]:
    """Texts from their tokens [B], each up to its own end; draws no more when all have ended."""
    shown = [b""] * len(texts)
    for tokens in drawn:
        for n, (text, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
            if not text.stopped:
                shown[n] += text.add(token)
        if all(text.stopped for text in texts):
            break
    return [before + text.rest() for before, text in zip(shown, texts, strict=True)]


def by_length(
    prompts: Sequence[Tensor], texts: Sequence[GrowingText], draw: Callable[[Tensor], Iterator[Tensor]]
) -> list[bytes]:
    """Texts after prompts [n] of any lengths, those of one length side by side, the shortest first.

    draw: gives the tokens [B] that follow prompts [B, n].
    """
    found = [b""] * len(prompts)
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [n for n, prompt in enumerate(prompts) if len(prompt) == length]
        drawn = draw(torch.stack([prompts[n] for n in places]))
        for n, text in zip(places, together(drawn, [texts[n] for n in places]), strict=True):
            found[n] = text
    return found
