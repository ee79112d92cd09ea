"""Preparation of a corpus in two passes: count the vocabulary, then write tokens."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError
from txl.text import files
from txl.text.datasets import PrepareOptions, Rule
from txl.text.readers import SPLITS, Pieces, Reader
from txl.text.vocabulary import (
    ByteVocabulary,
    Tokens,
    Vocabulary,
    WordVocabulary,
    decoded_again,
    first_words,
    token_dtype,
    words_of,
)

META, VOCABULARY = "corpus.json", "vocabulary.txt"
NAMES = (*(f"{split}.bin" for split in SPLITS), VOCABULARY, META)
FORMAT = 5
# bytes; a longer word means that the file is not a text of words, and would exceed the promised
# memory
LONGEST_WORD = 1 << 20


def make_vocabulary(reader: Reader, rule: Rule, options: PrepareOptions) -> Vocabulary:
    """Make the vocabulary of a source, from the given file or by reading the source once.

    Raises:
        TxlError: the source is not text of the rule's kind, or the file is damaged.
    """
    if rule.unit == "bytes":
        used: set[int] = set()
        for _, piece in reader.pieces():
            used.update(piece.translate(None, delete=bytes(used)))
        dropped = b"\n" if options.newline == "drop" else b""
        return ByteVocabulary(bytes(sorted(used - set(dropped))), dropped)
    lower = rule.lower or bool(options.lower)
    if options.vocabulary is not None:  # the first word of each line, in order
        content = files.read(options.vocabulary)
        try:
            return WordVocabulary(decoded_again(first_words(content)), lower, rule.end)
        except TxlError as error:
            raise TxlError(f"{options.vocabulary}: {error}") from error
    return _counted(reader, rule, options, lower)


def _whole_words(pieces: Pieces, source: str, names: Sequence[str] = SPLITS) -> Iterator[tuple[int, str]]:
    """Cut text at white space. Each split's last piece must end with white space.

    names: the splits' names, for messages.

    Raises:
        TxlError: the text is not UTF-8, or a word is longer than LONGEST_WORD.
    """
    carry, at = b"", [0, 0, 0]
    for split, piece in pieces:
        piece = carry + piece
        cut = max(piece.rfind(space) for space in (b" ", b"\n", b"\t", b"\r")) + 1
        carry = piece[cut:]
        if len(carry) > LONGEST_WORD:
            raise TxlError(f"{source}: a word of more than {LONGEST_WORD:,} bytes; this is no text of words")
        try:
            yield split, piece[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            where = f"byte {at[split] + error.start:,} of {names[split]}"
            raise TxlError(f"{source}: is not UTF-8 ({where}), which words need; bytes do not") from error
        at[split] += cut


def _counted(reader: Reader, rule: Rule, options: PrepareOptions, lower: bool) -> WordVocabulary:
    """Count a source's words and make the vocabulary: the word that ends a line, then words, and
    the unknown one if the rule has it, by falling count, ties by first appearance."""
    counts: list[Counter[str]] = [Counter() for _ in SPLITS]
    for split, text in _whole_words(reader.pieces(), reader.description):
        if split in rule.counted:
            counts[split].update(words_of(text, lower, rule.end))
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    del total[rule.end]
    if not total:
        raise TxlError(f"{reader.description}: holds no words to make a vocabulary of")
    words = [(word, count) for word, count in total.most_common() if word != rule.unknown]
    minimum = max(rule.min_count, options.min_count)
    kept = [(word, count) for word, count in words[: options.max_words] if count >= minimum]
    if rule.unknown is not None:
        kept.append((rule.unknown, total.total() - sum(count for _, count in kept)))
        kept.sort(key=lambda item: -item[1])
    return WordVocabulary([rule.end, *(word for word, _ in kept)], lower, rule.end)


@dataclass
class _File:
    """A file into which a split is written."""

    file: IO[bytes]
    items: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def write(self, items: npt.NDArray[Any]) -> None:
        self.file.write(items.data)
        self.hash.update(items.data)
        self.items += len(items)


def write_corpus(folder: Path, reader: Reader, vocabulary: Vocabulary, rule: Rule) -> None:
    """Write a corpus to an empty folder.

    Raises:
        TxlError: the source is damaged, or a split is empty. OSError: the folder cannot be written.
    """
    with ExitStack() as opened:
        splits = {name: _File(opened.enter_context((folder / f"{name}.bin").open("wb"))) for name in SPLITS}
        if rule.shuffled:  # the word that ends a sentence opens the first one, too
            splits["train"].write(np.array([vocabulary.start], token_dtype(len(vocabulary))))
        for n, tokens in _encoded(reader, vocabulary):
            splits[SPLITS[n]].write(tokens)
    for name, split in splits.items():
        if split.items <= (name == "train" and rule.shuffled):
            raise TxlError(
                f"{reader.description}: the {name} split is empty; the text is too short, or has too few lines"
            )
    content = vocabulary.to_file()
    (folder / VOCABULARY).write_bytes(content)
    hashes = {"vocabulary": hashlib.sha256(content)} | {name: split.hash for name, split in splits.items()}
    meta: dict[str, Any] = {
        "format": FORMAT,
        "rule": rule.name,
        "source": reader.description,
        "vocabulary": vocabulary.settings(),
        "sha256": {name: hash.hexdigest() for name, hash in hashes.items()},
        "tokens": {name: split.items for name, split in splits.items()},
    }
    meta["sha256"] = meta["sha256"] | {META: checksum(meta)}
    (folder / META).write_text(json.dumps(meta, indent=2))


def checksum(meta: dict[str, Any]) -> str:
    """Return the SHA-256 of the values of corpus.json, without its own."""
    hashes = {name: x for name, x in meta["sha256"].items() if name != META}
    return hashlib.sha256(json.dumps(meta | {"sha256": hashes}, sort_keys=True).encode()).hexdigest()


def _encoded(reader: Reader, vocabulary: Vocabulary) -> Iterator[tuple[int, Tokens]]:
    """Yield (split, tokens) piece by piece."""
    pieces = reader.pieces()
    if isinstance(vocabulary, WordVocabulary):
        for n, text in _whole_words(pieces, reader.description):
            try:
                tokens = vocabulary.encode_text(text)
            except TxlError as error:
                raise TxlError(f"{reader.description}: {error}") from error
            yield n, tokens
        return
    for n, piece in pieces:
        yield n, vocabulary.encode(piece)


def encode_file(vocabulary: Vocabulary, path: Path, limit: int | None = None) -> Tokens:
    """Encode a text file: all of its tokens [n], or the first `limit`, for which no more of the
    file, or of a pipe, is read than needed, unless it is compressed.

    Raises:
        TxlError: as in `txl.text.files.read` and `Vocabulary.encode`.
    """
    if limit is None:
        return vocabulary.encode(files.read(path))
    found = [vocabulary.encode(b"")]
    pieces, missing = files.pieces(path), limit
    if isinstance(vocabulary, WordVocabulary):
        closed = ((0, piece) for piece in chain(pieces, [b" "]))
        for _, text in _whole_words(closed, str(path), ["the text"]):
            found.append(vocabulary.encode_text(text, missing))
            missing -= len(found[-1])
            if not missing:
                break
        return np.concatenate(found)
    for piece in pieces:
        while piece and missing:  # a vocabulary may leave some bytes out
            found.append(vocabulary.encode(piece[:missing]))
            piece = piece[missing:]
            missing -= len(found[-1])
        if not missing:
            break
    return np.concatenate(found)
