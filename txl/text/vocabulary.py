"""Vocabularies of bytes or words, and their files."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError
from txl.fields import from_values
from txl.text.files import without_mark

LINE_END, SENTENCE = "<eos>", "<S>"
_UNKNOWN = ("<unk>", "<UNK>")
_SHOWN = 5  # maximum number of wrong symbols listed in a message
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


class Vocabulary(Protocol):
    """A vocabulary: maps symbols to tokens. Vocabularies with equal contents are equal."""

    @property
    def unit(self) -> Unit: ...

    def __len__(self) -> int: ...

    @property
    def start(self) -> int:
        """The token that is taken to precede a text."""
        ...

    def encode(self, text: bytes) -> Tokens:
        """Return tokens [n] of `token_dtype(len(self))`; raise TxlError for symbols not in the
        vocabulary."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes: ...

    def to_file(self) -> bytes:
        """Return the content of its file; `from_file` reads it, together with `settings`."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the settings that its file does not hold, as JSON values."""
        ...


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes that a corpus uses, in order; token n is byte symbols[n].

    Attributes:
        dropped: bytes that are removed from a text before it is encoded, such as newlines in the
            original preparation of enwik8.
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
        """The token of a newline, or the first token if there is none."""
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
        """Return one symbol a line, such as 0x0a."""
        return b"".join(b"0x%02x\n" % symbol for symbol in self.symbols)

    def settings(self) -> dict[str, Any]:
        return {"unit": self.unit, "dropped": list(self.dropped)}


@dataclass(frozen=True, init=False)
class WordVocabulary:
    """Words separated by white space; token n is words[n].

    White space is Unicode's, or only ASCII's if a word of the vocabulary contains other white space
    (Python 2 produced such words by splitting bytes), since no text could contain that word
    otherwise.

    `<eos>` ends a line, or `<S>` where sentences are independent; `<unk>` or `<UNK>`, if there is
    one, replaces every word that is not in the vocabulary.

    Attributes:
        lower: convert text to lower case before looking words up.
        end: the word that a line end becomes, `<eos>` or `<S>`.
        decoded_again: number of words that the function `decoded_again` repaired, for a message.
        ascii_space: whether only ASCII white space separates words.
    """

    words: tuple[str, ...]
    lower: bool
    end: str
    decoded_again: int = field(repr=False, compare=False)
    ascii_space: bool = field(repr=False, compare=False)
    _table: dict[str, int] = field(repr=False, compare=False)

    def __init__(
        self, words: Sequence[str], *, lower: bool = False, end: str | None = None, decoded_again: int = 0
    ) -> None:
        """end: the word for a line end; None for `<eos>` if there is one, else `<S>`.

        Raises:
            TxlError: a word is duplicate, empty or contains ASCII white space (the message counts
                lines from 1, as in the file), there are fewer than two words, or none that ends a
                line.
        """
        table = {word: n for n, word in enumerate(words)}
        bad = [n for n, word in enumerate(words, 1) if _WORD.fullmatch(word) is None]
        if bad:
            raise TxlError(f"vocabulary: {_name_lines(bad)} not one word ({words[bad[0] - 1]!r})")
        if len(table) < len(words):
            first = {word: n for n, word in reversed(list(enumerate(words, 1)))}
            twice = [n for n, word in enumerate(words, 1) if first[word] != n]
            raise TxlError(f"vocabulary: {_name_lines(twice)} a repetition ({words[twice[0] - 1]!r}); each word once")
        if len(words) < 2:
            raise TxlError(f"vocabulary: {len(words)} word(s) are too few; at least 2 are needed")
        if end is None:
            end = SENTENCE if SENTENCE in table and LINE_END not in table else LINE_END
        if end not in table:
            raise TxlError(f"vocabulary: {end} is not there; it is the word that ends a line")
        fields = {"words": tuple(words), "lower": lower, "end": end, "decoded_again": decoded_again, "_table": table}
        for name, value in (fields | {"ascii_space": any(map(str.isspace, set("".join(words))))}).items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def unit(self) -> Unit:
        return "words"

    @property
    def start(self) -> int:
        """The token of the word that ends a line."""
        return self._table[self.end]

    @property
    def unknown(self) -> int | None:
        """The token for words that are not in the vocabulary, or None."""
        return next((self._table[word] for word in _UNKNOWN if word in self._table), None)

    def missing(self, words: Iterable[str]) -> list[str]:
        """Return the words that are not in the vocabulary, each once, in order."""
        return [word for word in dict.fromkeys(words) if word not in self._table]

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
            raise TxlError(lacking(self.missing(words)))
        return tokens.astype(token_dtype(len(self)))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the words joined by spaces as UTF-8; the word that ends a line becomes a
        newline."""
        text = " ".join("\n" if self.words[t] == self.end else self.words[t] for t in tokens)
        return text.replace(" \n", "\n").replace("\n ", "\n").encode()

    def to_file(self) -> bytes:
        """UTF-8, one word a line."""
        return "".join(f"{word}\n" for word in self.words).encode()

    def settings(self) -> dict[str, Any]:
        return {"unit": self.unit, "lower": self.lower, "end": self.end}


def words_of(text: str, lower: bool, end: str, ascii_space: bool = False) -> list[str]:
    """Return the words between white space, and `end` for each line end."""
    text = (text.lower() if lower else text).replace("\n", f" {end} ")
    return _WORD.findall(text) if ascii_space else text.split()


def decoded_again(words: Sequence[str]) -> tuple[list[str], int]:
    """Repair words whose UTF-8 was read as Latin-1, as Python 3 can do with pickles of Python 2.
    Return all words and the number of repaired ones.

    The whole vocabulary decides: it is repaired if no word has a character above U+00FF and every
    word with a character from U+0080 on, taken as bytes, is valid UTF-8. A real word such as "café"
    is not, so a single one shows that the vocabulary is right, and no word is changed. Repaired
    words remain distinct, since different bytes decode to different strings.
    """
    try:
        found = [word if word.isascii() else word.encode("latin-1").decode("utf-8") for word in words]
    except UnicodeError:
        return list(words), 0
    return found, sum(not word.isascii() for word in words)


def words_decoded_again(count: int) -> str:
    """Return the message about words that `decoded_again` repaired."""
    return f"{count:,} words of the vocabulary were UTF-8 read as Latin-1 and have been decoded again"


def lacking(words: list[str]) -> str:
    """Return the message about words that are not in a vocabulary: the first of them and their
    number."""
    names = ", ".join(repr(word) for word in words[:_SHOWN]) + (", .." if len(words) > _SHOWN else "")
    return f"the text holds {len(words)} word(s) that the vocabulary lacks, and it has no <unk>: {names}"


@dataclass(frozen=True)
class Settings:
    """JSON fields of `Vocabulary.settings`."""

    unit: str
    dropped: tuple[int, ...] = ()
    lower: bool = False
    end: str | None = None


def from_file(content: bytes, settings: Any) -> Vocabulary:
    """Make the vocabulary from what `to_file` and `settings` returned.

    Raises:
        TxlError: content or settings are invalid; the message names the lines at fault.
    """
    given = from_values(Settings, settings)
    if given.unit == "bytes":
        if not all(0 <= byte < 256 for byte in given.dropped):
            raise TxlError(f"vocabulary: dropped must be bytes from 0 to 255, got {list(given.dropped)!r:.80}")
        return _bytes_from_file(content, bytes(given.dropped))
    if given.unit != "words":
        raise TxlError(f"vocabulary: unit must be bytes or words, got {given.unit!r}")
    return WordVocabulary(_utf8_lines(content), lower=given.lower, end=given.end)


def first_words(content: bytes) -> list[str]:
    """Return the first word of each line, as the released code reads a vocabulary file; only ASCII
    white space ends a word.

    Raises:
        TxlError: it is not UTF-8, or a line is empty.
    """
    content = without_mark(content, "vocabulary")
    lines = [_WORD.search(line) for line in _utf8_lines(content)]
    empty = [n for n, line in enumerate(lines, 1) if line is None]
    if empty:
        raise TxlError(f"vocabulary: {_name_lines(empty)} empty")
    return [line[0] for line in lines if line is not None]


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
        raise TxlError(f"vocabulary: {_name_lines(twice)} a repetition; each byte once")
    if not symbols:
        raise TxlError("vocabulary: the file is empty")
    return vocabulary


def _name_lines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", .." if len(numbers) > _SHOWN else "")
    return f"line {shown} is" if len(numbers) == 1 else f"lines {shown} are"
