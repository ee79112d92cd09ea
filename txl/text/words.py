"""Words between white space as tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from txl.errors import TxlError
from txl.text.tokens import SHOWN, Tokens, Unit, name_lines, token_dtype

LINE_END, SENTENCE = "<eos>", "<S>"
UNKNOWN = ("<unk>", "<UNK>")


@dataclass(frozen=True, init=False)
class WordVocabulary:
    """Words between white space; token n stands for words[n].

    `<eos>` ends a line, or `<S>` where sentences stand alone; `<unk>` or `<UNK>`, if there is one,
    stands for every word that is not there.

    Attributes:
        lower: text is put in lower case before it is looked up.
        end: the word a line end becomes, `<eos>` or `<S>`.
    """

    words: tuple[str, ...]
    lower: bool
    end: str
    _table: dict[str, int] = field(repr=False, compare=False)

    def __init__(self, words: Sequence[str], *, lower: bool = False, end: str | None = None) -> None:
        """end: by default `<eos>` if there is one, else `<S>`.

        Raises:
            TxlError: a word is there twice, empty or holds white space (lines count from 1, as in
                the file), there are fewer than two, or none that ends a line.
        """
        table = {word: n for n, word in enumerate(words)}
        bad = [n for n, word in enumerate(words, 1) if len(word.split()) != 1 or word != word.strip()]
        if bad:
            raise TxlError(f"vocabulary: {name_lines(bad)} not one word ({words[bad[0] - 1]!r})")
        if len(table) < len(words):
            first = {word: n for n, word in reversed(list(enumerate(words, 1)))}
            twice = [n for n, word in enumerate(words, 1) if first[word] != n]
            raise TxlError(f"vocabulary: {name_lines(twice)} a repetition ({words[twice[0] - 1]!r}); each word once")
        if len(words) < 2:
            raise TxlError(f"vocabulary: {len(words)} word(s) are too few; at least 2 are needed")
        if end is None:
            end = SENTENCE if SENTENCE in table and LINE_END not in table else LINE_END
        if end not in table:
            raise TxlError(f"vocabulary: {end} is not there; it is the word that ends a line")
        for name, value in {"words": tuple(words), "lower": lower, "end": end, "_table": table}.items():
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
        return next((self._table[word] for word in UNKNOWN if word in self._table), None)

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

    def encode_text(self, text: str) -> Tokens:
        """As `encode`, of text that is decoded already."""
        words = words_of(text, self.lower, self.end)
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


def words_of(text: str, lower: bool, end: str) -> list[str]:
    """What is between white space, and `end` for each line end."""
    return (text.lower() if lower else text).replace("\n", f" {end} ").split()


def lacking(words: list[str]) -> str:
    """What to say of words that a vocabulary lacks: the first of them and how many there are."""
    names = ", ".join(repr(word) for word in words[:SHOWN]) + (", .." if len(words) > SHOWN else "")
    return f"the text holds {len(words)} word(s) that the vocabulary lacks, and it has no <unk>: {names}"
