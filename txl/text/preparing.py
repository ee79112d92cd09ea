"""Preparation of a corpus in two passes: count the vocabulary, then write tokens to temporary files
that replace the corpus at the end."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from txl.errors import TxlError
from txl.paths import create, lock_folder, naming, read_text
from txl.text import files
from txl.text.datasets import PrepareOptions, Rule
from txl.text.files import Watch
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

META, VOCABULARY, SENTENCES = "corpus.json", "vocabulary.txt", "sentences.bin"
_NAMES = (*(f"{split}.bin" for split in SPLITS), SENTENCES, VOCABULARY)
FORMAT = 3
# bytes; a longer word means that the file is not a text of words, and would exceed the promised
# memory
LONGEST_WORD = 1 << 20


def make_vocabulary(reader: Reader, rule: Rule, options: PrepareOptions, watch: Watch) -> Vocabulary:
    """Make the vocabulary of a source, from the given file or by reading the source once.

    Raises:
        TxlError: the source is not text of the rule's kind, or the file is damaged.
    """
    if rule.unit == "bytes":
        used: set[int] = set()
        for _, piece in reader.pieces(watch):
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
    return _counted(_count(reader, lower, rule.end, watch), rule, options, lower)


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


def _count(reader: Reader, lower: bool, end: str, watch: Watch) -> list[Counter[str]]:
    """Count the words of each split; keys are in order of first appearance, which decides ties."""
    counts: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for split, text in _whole_words(reader.pieces(watch), reader.description):
        counts[split].update(words_of(text, lower, end))
    return counts


def _counted(counts: list[Counter[str]], rule: Rule, options: PrepareOptions, lower: bool) -> WordVocabulary:
    """Make a vocabulary from counts: the word that ends a line, then words by falling count, ties
    by first appearance."""
    total: Counter[str] = Counter()
    for split in rule.counted:
        total.update(counts[split])
    del total[rule.end]
    words = [(word, count) for word, count in total.most_common() if word != rule.unknown]
    minimum = max(rule.min_count, options.min_count)
    kept = [(word, count) for word, count in words[: options.max_words] if count >= minimum]
    if rule.unknown is not None:
        known = {word for word, _ in kept} | {rule.end}
        if rule.always_unknown or any(word not in known for split in counts for word in split):
            dropped = sum(count for _, count in words) - sum(count for _, count in kept)
            kept.append((rule.unknown, total[rule.unknown] + dropped))
            kept.sort(key=lambda item: -item[1])
    return WordVocabulary([rule.end, *(word for word, _ in kept)], lower, rule.end)


@dataclass
class _Split:
    """A temporary file into which a split, or the starts of its sentences, are written."""

    file: IO[bytes]  # unbuffered, so that closing it writes nothing
    path: Path  # the final path
    items: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def write(self, items: npt.NDArray[Any]) -> None:
        left = memoryview(items.tobytes())
        with naming(self.path):
            while left:
                left = left[self.file.write(left) :]
        self.hash.update(items.data)
        self.items += len(items)


def write_corpus(
    folder: Path, reader: Reader, vocabulary: Vocabulary, rule: Rule, options: PrepareOptions, watch: Watch
) -> None:
    """Write a corpus to a folder, or leave the corpus that is there unchanged.

    When all files are written, `finish` moves them into place, in a later process if need be.

    Raises:
        TxlError: the source is damaged, a split is empty, or the folder cannot be written or
            another process is writing to it.
    """
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            try:
                _remove_temporary(folder)  # left by a process that was killed
                _write(folder, reader, vocabulary, rule, options, watch)
            except BaseException:
                with suppress(OSError):
                    _remove_temporary(folder)
                    if fresh:
                        folder.rmdir()
                raise
            _swap(folder)
    except OSError as error:
        where = "" if error.filename is None else f" ({Path(error.filename).name})"
        raise TxlError(f"{folder}: the corpus cannot be written: {error.strerror or error}{where}") from error


def finish(folder: Path) -> None:
    """Complete a corpus whose files were all written by a process that died before moving them into
    place.

    Raises:
        TxlError: another process writes to the folder. OSError: the folder cannot be written.
    """
    if (folder / META).exists() or not _temporary(folder, META).exists():
        return
    with _alone(folder), suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        meta = json.loads(read_text(_temporary(folder, META)))
        if meta["checksum"] == checksum(meta):  # a truncated file is not completed
            _swap(folder)


def _remove_temporary(folder: Path) -> None:
    for name in (META, *_NAMES):
        _temporary(folder, name).unlink(missing_ok=True)


def _swap(folder: Path) -> None:
    """Move all temporary files into place. corpus.json is moved last, so a folder that has only the
    temporary one can be completed by calling this again."""
    (folder / META).unlink(missing_ok=True)
    meta = json.loads(read_text(_temporary(folder, META)))
    if meta["sentences"] is None:
        (folder / SENTENCES).unlink(missing_ok=True)
    for name in _NAMES:
        if _temporary(folder, name).exists():
            _temporary(folder, name).replace(folder / name)  # a process that has the old file mapped keeps its content
    _temporary(folder, META).replace(folder / META)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder against other preparations and against training runs that start on it; the
    operating system releases the lock when the process ends.

    Raises:
        TxlError: another process prepares a corpus there, or a run trains on the one there.
    """
    descriptor = lock_folder(folder)
    if descriptor is None:
        readers = lock_folder(folder, shared=True)
        if readers is None:
            raise TxlError(f"{folder}: another process is preparing a corpus there")
        os.close(readers)
        raise TxlError(f"{folder}: another process is training on the corpus there")
    try:
        yield
    finally:
        os.close(descriptor)


def _temporary(folder: Path, name: str) -> Path:
    """Return the temporary path for a file: always the same one in a folder, so that the next
    process that opens the folder can complete an interrupted preparation."""
    return folder / f".{name}.tmp"


def _create(folder: Path, name: str) -> IO[bytes]:
    return os.fdopen(create(_temporary(folder, name)), "wb", buffering=0)


def _write_whole(folder: Path, name: str, content: bytes) -> None:
    with _create(folder, name) as file:
        _Split(file, folder / name).write(np.frombuffer(content, np.uint8))


def _write(
    folder: Path, reader: Reader, vocabulary: Vocabulary, rule: Rule, options: PrepareOptions, watch: Watch
) -> None:
    with ExitStack() as opened:  # closes all files, whichever fails

        def begun(name: str) -> _Split:
            return _Split(opened.enter_context(_create(folder, name)), folder / name)

        splits = [begun(f"{split}.bin") for split in SPLITS]
        sentences = begun(SENTENCES) if rule.shuffled else None
        dtype = token_dtype(len(vocabulary))
        if sentences:
            splits[0].write(np.array([vocabulary.start], dtype))
        first = 0
        for n, tokens in _encoded(reader, vocabulary, watch):
            if sentences and n == 0:
                bounds = np.flatnonzero(tokens == vocabulary.start) + splits[0].items
                if len(bounds):
                    sentences.write(np.append(first, bounds[:-1]).astype(np.int64))
                    first = int(bounds[-1])
            splits[n].write(tokens)
    for name, split in zip(SPLITS, splits, strict=True):
        if split.items <= (name == "train" and rule.shuffled):
            raise TxlError(
                f"{reader.description}: the {name} split is empty; the text is too short, or has too few lines"
            )
    content = vocabulary.to_file()
    hashes = {name: split.hash for name, split in zip(SPLITS, splits, strict=True)}
    digests = b"".join([content, *(hash.digest() for hash in hashes.values())])
    if sentences:
        hashes["sentences"] = sentences.hash
    meta = {
        "format": FORMAT,
        "rule": rule.name,
        "newline": options.newline,
        "source": reader.description,
        "vocabulary": vocabulary.settings(),
        "sha256": {"vocabulary": hashlib.sha256(content).hexdigest()}
        | {name: hash.hexdigest() for name, hash in hashes.items()},
        "dtype": np.dtype(dtype).name,
        "tokens": {name: split.items for name, split in zip(SPLITS, splits, strict=True)},
        "sentences": sentences.items if sentences else None,
        "fingerprint": hashlib.sha256(digests).hexdigest(),
    }
    _write_whole(folder, VOCABULARY, content)
    meta["checksum"] = checksum(meta)
    _write_whole(folder, META, json.dumps(meta, indent=2).encode())


def checksum(meta: dict[str, Any]) -> str:
    """Compute the checksum of all other fields of `corpus.json`."""
    said = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _encoded(reader: Reader, vocabulary: Vocabulary, watch: Watch) -> Iterator[tuple[int, Tokens]]:
    """Yield (split, tokens) piece by piece."""
    pieces = reader.pieces(watch)
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
    file is read than needed.

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
