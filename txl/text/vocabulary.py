"""Vocabularies of bytes or words, and their files."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError
from txl.fields import from_values
from txl.text.files import plain_text

LINE_END, SENTENCE = "<eos>", "<S>"
_UNKNOWN = ("<unk>", "<UNK>")
_LOGGER = logging.getLogger(__name__)
_WORD = re.compile(r"[^ \t\n\r\v\f]+")

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""[n], of `token_dtype(len(vocabulary))`."""

Unit = Literal["bytes", "words"]


def token_dtype(size: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest of uint8, uint16 and uint32 that holds the tokens of a vocabulary of
    `size`."""
    if size <= 1 << 8:
        return np.uint8
    return np.uint16 if size <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes that a corpus uses, in order; token n is byte symbols[n].

    Attributes:
        dropped: bytes that are removed from a text before it is encoded, such as newlines in the
            original preparation of enwik8.
    """

    unit: ClassVar[Unit] = "bytes"
    symbols: bytes
    dropped: bytes = b""

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def start(self) -> int:
        """The token that is taken to precede a text: a newline's, or the first if there is
        none."""
        return max(self.symbols.find(b"\n"), 0)

    def encode(self, text: bytes) -> Tokens:
        """Return tokens [n], uint8.

        Raises:
            TxlError: the text has bytes that are not in the vocabulary; the message lists them.
        """
        if self.dropped:
            text = text.translate(None, delete=self.dropped)
        unknown = sorted(set(text.translate(None, delete=self.symbols)))
        if unknown:
            names = ", ".join(f"0x{b:02x} {chr(b)!r}" if b < 128 else f"0x{b:02x}" for b in unknown[:8])
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            raise TxlError(f"the text holds bytes that the training data never did: {names}{more}")
        table = bytes.maketrans(self.symbols, bytes(range(len(self.symbols))))
        # Not table[text], which needs an int64 index array, 8 bytes for each byte of text.
        return np.frombuffer(text.translate(table), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(self.symbols[t] for t in tokens)

    def to_file(self) -> bytes:
        """Return the content of its file, one symbol a line, such as 0x0a; `from_file` reads it,
        together with `settings`."""
        return b"".join(b"0x%02x\n" % symbol for symbol in self.symbols)

    def settings(self) -> dict[str, Any]:
        """Return what its file does not hold, as JSON values."""
        return {"unit": self.unit, "dropped": list(self.dropped)}


@dataclass(frozen=True)
class WordVocabulary:
    """Words separated by white space; token n is words[n].

    White space is Unicode's, or only ASCII's if a word of the vocabulary contains other white space
    (Python 2 produced such words by splitting bytes), since no text could contain that word
    otherwise.

    `<eos>` ends a line, or `<S>` where sentences are independent; `<unk>` or `<UNK>`, if there is
    one, replaces every word that is not in the vocabulary.

    Attributes:
        lower: convert text to lower case before looking words up.
        end: the word that a line end becomes; "" stands for `<eos>` if there is one, else `<S>`.
    """

    unit: ClassVar[Unit] = "words"
    words: Sequence[str]
    lower: bool = False
    end: str = ""

    def __post_init__(self) -> None:
        """Raise TxlError if a word is duplicate, empty or contains ASCII white space, if there are
        fewer than two words, or none that ends a line."""
        bad = next((word for word in self.words if _WORD.fullmatch(word) is None), None)
        if bad is not None:
            raise TxlError(f"vocabulary: a line holds {bad!r:.80}, not one word")
        if len(self._table) < len(self.words):
            twice = Counter(self.words).most_common(1)[0][0]
            raise TxlError(f"vocabulary: {twice!r:.80} is there twice; each word once")
        if len(self.words) < 2:
            raise TxlError(f"vocabulary: {len(self.words)} word(s) are too few; at least 2 are needed")
        end = self.end or (SENTENCE if SENTENCE in self._table and LINE_END not in self._table else LINE_END)
        if end not in self._table:
            raise TxlError(f"vocabulary: {end} is not there; it is the word that ends a line")
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "end", end)

    @cached_property
    def _table(self) -> dict[str, int]:
        return {word: n for n, word in enumerate(self.words)}

    @cached_property
    def ascii_space(self) -> bool:
        """Whether only ASCII white space separates words."""
        return any(map(str.isspace, set("".join(self.words))))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def start(self) -> int:
        """The token of the word that ends a line."""
        return self._table[self.end]

    @property
    def unknown(self) -> int | None:
        """The token for words that are not in the vocabulary, or None."""
        return next((self._table[word] for word in _UNKNOWN if word in self._table), None)

    def encode(self, text: bytes) -> Tokens:
        """Return tokens [n]. Each line end is a token; a last line without a line end gets none.

        Raises:
            TxlError: the text is not UTF-8, or has words that are not in the vocabulary, and there
                is no unknown word.
        """
        try:
            return self.encode_text(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TxlError(f"the text is not UTF-8 (at byte {error.start}); words need UTF-8") from error

    def encode_text(self, text: str, limit: int | None = None) -> Tokens:
        """Encode decoded text as `encode` does; limit: only the first `limit` tokens."""
        words = words_of(text, self.lower, self.end, self.ascii_space)[:limit]
        unknown = self.unknown
        found = map(self._table.get, words, repeat(-1 if unknown is None else unknown))
        tokens = np.fromiter(found, np.int64, len(words))
        if unknown is None and tokens.size and tokens.min() < 0:
            lacking = list(dict.fromkeys(word for word in words if word not in self._table))
            names = ", ".join(map(repr, lacking[:5])) + (", .." if len(lacking) > 5 else "")
            raise TxlError(f"the text holds words that the vocabulary lacks, and it has no <unk>: {names}")
        return tokens.astype(token_dtype(len(self)))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the words joined by spaces as UTF-8; the word that ends a line becomes a
        newline."""
        text = " ".join("\n" if self.words[t] == self.end else self.words[t] for t in tokens)
        return text.replace(" \n", "\n").replace("\n ", "\n").encode()

    def to_file(self) -> bytes:
        """Return the content of its file: UTF-8, one word a line."""
        return "".join(f"{word}\n" for word in self.words).encode()

    def settings(self) -> dict[str, Any]:
        """Return what its file does not hold, as JSON values."""
        return {"unit": self.unit, "lower": self.lower, "end": self.end}


Vocabulary = ByteVocabulary | WordVocabulary


def words_of(text: str, lower: bool, end: str, ascii_space: bool = False) -> list[str]:
    """Return the words between white space, and `end` for each line end."""
    text = (text.lower() if lower else text).replace("\n", f" {end} ")
    return _WORD.findall(text) if ascii_space else text.split()


def decoded_again(words: list[str]) -> list[str]:
    """Repair words whose UTF-8 was read as Latin-1, as Python 3 can do with pickles of Python 2;
    log how many there were.

    The whole vocabulary decides: it is repaired if no word has a character above U+00FF and every
    word with a character from U+0080 on, taken as bytes, is valid UTF-8. A real word such as "café"
    is not, so a single one shows that the vocabulary is right, and no word is changed. Repaired
    words remain distinct, since different bytes decode to different strings.
    """
    try:
        found = [word if word.isascii() else word.encode("latin-1").decode("utf-8") for word in words]
    except UnicodeError:
        return words
    count = sum(not word.isascii() for word in words)
    if count:
        _LOGGER.warning(
            "%s words of the vocabulary were UTF-8 read as Latin-1 and have been decoded again", f"{count:,}"
        )
    return found


@dataclass(frozen=True)
class Settings:
    """JSON fields of a vocabulary's `settings`."""

    unit: str
    dropped: tuple[int, ...] = ()
    lower: bool = False
    end: str = ""


def from_file(content: bytes, settings: Any) -> Vocabulary:
    """Make the vocabulary from what `to_file` and `settings` returned.

    Raises:
        TxlError: content or settings are invalid.
    """
    given, lines = from_values(Settings, settings), _utf8_lines(content)
    if given.unit == "words":
        return WordVocabulary(lines, given.lower, given.end)
    if given.unit != "bytes":
        raise TxlError(f"vocabulary: unit must be bytes or words, got {given.unit!r}")
    try:
        vocabulary = ByteVocabulary(bytes(int(line, 16) for line in lines), bytes(given.dropped))
    except ValueError as error:
        raise TxlError(f"vocabulary: every line must be a byte such as 0x0a, and so must dropped ({error})") from error
    if not 0 < len(set(vocabulary.symbols)) == len(lines):
        raise TxlError("vocabulary: a byte is there twice, or none at all; each byte once")
    return vocabulary


def first_words(content: bytes) -> list[str]:
    """Return the first word of each line, "" if there is none, as the released code reads a
    vocabulary file; only ASCII white space ends a word.

    Raises:
        TxlError: it is not UTF-8.
    """
    lines = _utf8_lines(plain_text(content, "vocabulary"))
    return [word[0] if (word := _WORD.search(line)) else "" for line in lines]


def _utf8_lines(content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TxlError(f"vocabulary: is not UTF-8 (at byte {error.start:,})") from error
    return text.removesuffix("\n").split("\n") if text else []
