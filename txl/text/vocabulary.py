"""Vocabularies: bytes or words as tokens, and the file each is kept in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from txl.errors import TxlError
from txl.text.tokens import Tokens, Unit, name_lines
from txl.text.words import WordVocabulary

__all__ = ["ByteVocabulary", "Tokens", "Vocabulary", "WordVocabulary", "first_words", "from_file"]


class Vocabulary(Protocol):
    """What a token stands for. Two are equal if their contents are."""

    @property
    def unit(self) -> Unit: ...

    def __len__(self) -> int: ...

    @property
    def start(self) -> int:
        """The token taken to precede a text."""
        ...

    def encode(self, text: bytes) -> Tokens:
        """Tokens [n] of `token_dtype(len(self))`; TxlError for what the vocabulary lacks."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes: ...

    def to_file(self) -> bytes:
        """The content of its file; `from_file` with `settings` reads it."""
        ...

    def settings(self) -> dict[str, Any]:
        """What its file does not say, JSON-able."""
        ...


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes a corpus uses, in order; token n stands for byte symbols[n].

    Attributes:
        dropped: bytes that a text may hold and that are left out of it, as the newlines of the
            original enwik8.
    """

    symbols: bytes
    dropped: bytes = b""

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def unit(self) -> Unit:
        return "bytes"

    @property
    def start(self) -> int:
        """Newline, or the first symbol."""
        return max(self.symbols.find(b"\n"), 0)

    def encode(self, text: bytes) -> Tokens:
        """Tokens [n], uint8.

        Raises:
            TxlError: the text holds bytes the vocabulary lacks, which it lists.
        """
        if self.dropped:
            text = text.translate(None, delete=self.dropped)
        unknown = sorted(set(text.translate(None, delete=self.symbols)))
        if unknown:
            names = ", ".join(f"0x{b:02x} {chr(b)!r}" if b < 128 else f"0x{b:02x}" for b in unknown[:8])
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            raise TxlError(f"the text holds bytes that the training data never did: {names}{more}")
        table = bytes.maketrans(self.symbols, bytes(range(len(self.symbols))))
        # Not table[text], which takes indices of 8 bytes.
        return np.frombuffer(text.translate(table), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(self.symbols[t] for t in tokens)

    def to_file(self) -> bytes:
        """One symbol a line, as 0x0a."""
        return b"".join(b"0x%02x\n" % symbol for symbol in self.symbols)

    def settings(self) -> dict[str, Any]:
        return {"unit": self.unit, "dropped": list(self.dropped)}


def from_file(content: bytes, settings: dict[str, Any]) -> Vocabulary:
    """The vocabulary whose `to_file` and `settings` these are.

    Raises:
        TxlError: the content or the settings are not of that form, with the lines at fault.
    """
    if settings.get("unit") == "bytes":
        return _bytes_from_file(content, bytes(settings.get("dropped", ())))
    if settings.get("unit") != "words":
        raise TxlError(f"vocabulary: unit must be bytes or words, got {settings.get('unit')!r}")
    return WordVocabulary(_utf8_lines(content), lower=bool(settings.get("lower")), end=settings.get("end"))


def first_words(content: bytes) -> list[str]:
    """The first word of each line, as the released code reads a vocabulary file.

    Raises:
        TxlError: it is not UTF-8, or a line is empty.
    """
    lines = [line.split(maxsplit=1) for line in _utf8_lines(content)]
    empty = [n for n, line in enumerate(lines, 1) if not line]
    if empty:
        raise TxlError(f"vocabulary: {name_lines(empty)} empty")
    return [line[0] for line in lines]


def _utf8_lines(content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TxlError(f"vocabulary: line {line} is not UTF-8") from error
    return text.removesuffix("\n").split("\n") if text else []


def _bytes_from_file(content: bytes, dropped: bytes) -> ByteVocabulary:
    lines = _utf8_lines(content)
    try:
        symbols = [int(line, 16) for line in lines]
        vocabulary = ByteVocabulary(bytes(symbols), dropped)
    except ValueError as error:
        raise TxlError(f"vocabulary: every line must be a byte such as 0x0a ({error})") from error
    twice = [n for n, symbol in enumerate(symbols, 1) if symbol in symbols[: n - 1]]
    if twice:
        raise TxlError(f"vocabulary: {name_lines(twice)} a repetition; each byte once")
    if not symbols:
        raise TxlError("vocabulary: the file is empty")
    return vocabulary
