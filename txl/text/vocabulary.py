"""Tokens and vocabularies: bytes or words as tokens, and the file each vocabulary is kept in."""

import hashlib
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
_SHOWN = 5  # of what is wrong, in a message
_WORD = re.compile(r"[^ \t\n\r\v\f]+")

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""[n], of `token_dtype(len(vocabulary))`."""

Unit = Literal["bytes", "words"]


def token_dtype(size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest of uint8, uint16, uint32 that holds the tokens of a vocabulary of `size`."""
    if size <= 1 << 8:
        return np.uint8
    return np.uint16 if size <= 1 << 16 else np.uint32


def content(tokens: Tokens) -> str:
    """SHA-256 of a text's tokens."""
    return hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()


class Vocabulary(Protocol):
    """A vocabulary: the symbol of each token. Two are equal if their contents are."""

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
        """The settings that its file does not hold, JSON-able."""
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


@dataclass(frozen=True, init=False)
class WordVocabulary:
    """Words between white space; token n stands for words[n].

    White space is Unicode's, or ASCII's alone where a word holds other white space, as words do
    that Python 2 cut out of bytes: else no text could have such a word.

    `<eos>` ends a line, or `<S>` where sentences stand alone; `<unk>` or `<UNK>`, if there is one,
    stands for every word that is not there.

    Attributes:
        lower: text is put in lower case before it is looked up.
        end: the word a line end becomes, `<eos>` or `<S>`.
        decoded_again: how many words `decoded_again` has put right, for a message.
        ascii_space: whether words end at ASCII white space alone.
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
        """end: by default `<eos>` if there is one, else `<S>`.

        Raises:
            TxlError: a word is there twice, empty or holds ASCII white space (lines count from 1,
                as in the file), there are fewer than two, or none that ends a line.
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
        """The token of the words that are not there."""
        return next((self._table[word] for word in _UNKNOWN if word in self._table), None)

    def missing(self, words: Iterable[str]) -> list[str]:
        """Those of the words that are not there, each once, in order."""
        return [word for word in dict.fromkeys(words) if word not in self._table]

    def encode(self, text: bytes) -> Tokens:
        """Tokens [n]; each line end is a token, so a last line without one has none.

        Raises:
            TxlError: the text is not UTF-8, or holds words the vocabulary lacks and it has no
                unknown word.
        """
        try:
            return self.encode_text(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TxlError(f"the text is not UTF-8 (at byte {error.start}); words need UTF-8") from error

    def encode_text(self, text: str, limit: int | None = None) -> Tokens:
        """As `encode`, of text that is decoded already; limit: only the first so many tokens."""
        words = words_of(text, self.lower, self.end, self.ascii_space)[:limit]
        unknown = self.unknown
        found = map(self._table.get, words, repeat(-1 if unknown is None else unknown))
        tokens = np.fromiter(found, np.int64, len(words))
        if unknown is None and tokens.size and tokens.min() < 0:
            raise TxlError(lacking(self.missing(words)))
        return tokens.astype(token_dtype(len(self)))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Words joined by spaces; what ends a line becomes a newline."""
        text = " ".join("\n" if self.words[t] == self.end else self.words[t] for t in tokens)
        return text.replace(" \n", "\n").replace("\n ", "\n").encode()

    def to_file(self) -> bytes:
        """UTF-8, one word a line."""
        return "".join(f"{word}\n" for word in self.words).encode()

    def settings(self) -> dict[str, Any]:
        return {"unit": self.unit, "lower": self.lower, "end": self.end}


def words_of(text: str, lower: bool, end: str, ascii_space: bool = False) -> list[str]:
    """The words between white space, and `end` for each line end."""
    text = (text.lower() if lower else text).replace("\n", f" {end} ")
    return _WORD.findall(text) if ascii_space else text.split()


def decoded_again(words: Sequence[str]) -> tuple[list[str], int]:
    """Words whose UTF-8 was read as Latin-1, as Python 3 may read Python 2's pickles, put right;
    and how many of them there were.

    The whole vocabulary decides: no word has a character above U+00FF, and every word with one from
    U+0080 on is strict UTF-8 once its characters are taken for bytes. A single real word such as
    "café" is not, so it shows that the vocabulary is right; all its words are kept. No two words
    become equal, since different bytes decode to different texts.
    """
    try:
        found = [word if word.isascii() else word.encode("latin-1").decode("utf-8") for word in words]
    except UnicodeError:
        return list(words), 0
    return found, sum(not word.isascii() for word in words)


def words_decoded_again(count: int) -> str:
    """The message about words that `decoded_again` has put right."""
    return f"{count:,} words of the vocabulary were UTF-8 read as Latin-1 and have been decoded again"


def lacking(words: list[str]) -> str:
    """The message about words that a vocabulary lacks: the first of them and how many there are."""
    names = ", ".join(repr(word) for word in words[:_SHOWN]) + (", .." if len(words) > _SHOWN else "")
    return f"the text holds {len(words)} word(s) that the vocabulary lacks, and it has no <unk>: {names}"


@dataclass(frozen=True)
class Settings:
    """The JSON of `Vocabulary.settings`."""

    unit: str
    dropped: tuple[int, ...] = ()
    lower: bool = False
    end: str | None = None


def from_file(content: bytes, settings: Any) -> Vocabulary:
    """The vocabulary whose `to_file` and `settings` these are.

    Raises:
        TxlError: the content or the settings are not of that form, with the lines at fault.
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
    """The first word of each line, as the released code reads a vocabulary file; words end at ASCII
    white space.

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
