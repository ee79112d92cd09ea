"""Two readings of a source: its vocabulary is counted, then its tokens are written beside a corpus,
which they replace at the end."""

import hashlib
import json
import logging
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
    lacking,
    token_dtype,
    words_decoded_again,
    words_of,
)

META, VOCABULARY, SENTENCES = "corpus.json", "vocabulary.txt", "sentences.bin"
_NAMES = (*(f"{split}.bin" for split in SPLITS), SENTENCES, VOCABULARY)
FORMAT = 3
LONGEST_WORD = 1 << 20  # bytes; more is no text of words, and would not fit the memory promised


def make_vocabulary(reader: Reader, rule: Rule, options: PrepareOptions, watch: Watch) -> Vocabulary:
    """The vocabulary of a source, from the file given or from one reading.

    Raises:
        TxlError: the source is no such text, or the file is damaged or lacks words.
    """
    if rule.unit == "bytes":
        used: set[int] = set()
        for _, piece in reader.pieces(watch):
            used.update(piece.translate(None, delete=bytes(used)))
        dropped = b"\n" if options.newline == "drop" else b""
        return ByteVocabulary(bytes(sorted(used - set(dropped))), dropped)
    lower = rule.lower or bool(options.lower)
    given = options.vocabulary and _read_words(options.vocabulary, lower=lower, end=rule.end)
    if given and given.unknown is not None:
        return given
    counts = _count(reader, lower, rule.end, watch, given.ascii_space if given else False)
    vocabulary = given or _counted(counts, rule, options, lower)
    missing = [] if vocabulary.unknown is not None else vocabulary.missing(word for split in counts for word in split)
    if missing:
        raise TxlError(f"{reader.description}: {lacking(missing)}")
    return vocabulary


def _read_words(path: Path, *, lower: bool, end: str) -> WordVocabulary:
    """A user's vocabulary file: the first word of each line, in its order."""
    content = files.read(path)
    try:
        words, count = decoded_again(first_words(content))
        vocabulary = WordVocabulary(words, lower=lower, end=end, decoded_again=count)
    except TxlError as error:
        raise TxlError(f"{path}: {error}") from error
    if count:
        logging.getLogger(__name__).warning("%s: %s", path, words_decoded_again(count))
    return vocabulary


def _whole_words(pieces: Pieces, source: str, names: Sequence[str] = SPLITS) -> Iterator[tuple[int, str]]:
    """Text cut at white space. Each split's last piece must end with white space.

    names: of the splits, for messages.

    Raises:
        TxlError: it is not UTF-8, or a word is longer than LONGEST_WORD.
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


def _count(reader: Reader, lower: bool, end: str, watch: Watch, ascii_space: bool) -> list[Counter[str]]:
    """Count the words of each split, in order of first appearance: the order of ties."""
    counts: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for split, text in _whole_words(reader.pieces(watch), reader.description):
        counts[split].update(words_of(text, lower, end, ascii_space))
    return counts


def _counted(counts: list[Counter[str]], rule: Rule, options: PrepareOptions, lower: bool) -> WordVocabulary:
    """The word that ends a line, then by falling count; ties by first appearance."""
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
    return WordVocabulary([rule.end, *(word for word, _ in kept)], lower=lower, end=rule.end)


@dataclass
class _Split:
    """A split, or the starts of its sentences, while it is written to a temporary file."""

    file: IO[bytes]  # without a buffer: closing it writes nothing
    path: Path  # where it will be
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
    """Writes a corpus to a folder, or leaves the one that is there as it was.

    Once all of it is written, `finish` puts it into its place, at any later time if need be.

    Raises:
        TxlError: the source is damaged, a split is empty, or the folder cannot be written or is
            being written by another.
    """
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            try:
                _remove_temporary(folder)  # of a process that was killed
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
    """Puts a corpus into its place that was written whole by a process that died before it did so.

    Raises:
        TxlError: another process is at it. OSError: the folder cannot be written.
    """
    if (folder / META).exists() or not _temporary(folder, META).exists():
        return
    with _alone(folder), suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        meta = json.loads(read_text(_temporary(folder, META)))
        if meta["checksum"] == checksum(meta):  # a file cut short ends nothing
            _swap(folder)


def _remove_temporary(folder: Path) -> None:
    for name in (META, *_NAMES):
        _temporary(folder, name).unlink(missing_ok=True)


def _swap(folder: Path) -> None:
    """A folder with corpus.json is whole; one with its temporary file is, too, after this."""
    (folder / META).unlink(missing_ok=True)
    meta = json.loads(read_text(_temporary(folder, META)))
    if meta["sentences"] is None:
        (folder / SENTENCES).unlink(missing_ok=True)
    for name in _NAMES:
        if _temporary(folder, name).exists():
            _temporary(folder, name).replace(folder / name)  # whoever has the old one mapped keeps it
    _temporary(folder, META).replace(folder / META)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a folder against other preparations and against runs that begin to train on it; the
    system lets go of it when a process ends.

    Raises:
        TxlError: another preparation is going on there, or a run trains on the corpus.
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
    """One a folder, so that whoever opens it next can end what was begun."""
    return folder / f".{name}.tmp"


def _create(folder: Path, name: str) -> IO[bytes]:
    return os.fdopen(create(_temporary(folder, name)), "wb", buffering=0)


def _write_whole(folder: Path, name: str, content: bytes) -> None:
    with _create(folder, name) as file:
        _Split(file, folder / name).write(np.frombuffer(content, np.uint8))


def _write(
    folder: Path, reader: Reader, vocabulary: Vocabulary, rule: Rule, options: PrepareOptions, watch: Watch
) -> None:
    with ExitStack() as opened:  # closes all, whichever fails

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
            raise TxlError(f"{reader.description}: the {name} split is empty")
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
    """Checksum of all that `corpus.json` says."""
    said = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _encoded(reader: Reader, vocabulary: Vocabulary, watch: Watch) -> Iterator[tuple[int, Tokens]]:
    """Tokens piece by piece."""
    pieces = reader.pieces(watch)
    if isinstance(vocabulary, WordVocabulary):
        for n, text in _whole_words(pieces, reader.description):
            yield n, vocabulary.encode_text(text)
        return
    for n, piece in pieces:
        yield n, vocabulary.encode(piece)


def encode_file(vocabulary: Vocabulary, path: Path, limit: int | None = None) -> Tokens:
    """Tokens [n] of a text file: all of them, or the first `limit`, for which no more of it is read
    than they take.

    Raises:
        TxlError: as `txl.text.files.read` and `Vocabulary.encode`.
    """
    if limit is None:
        return vocabulary.encode(files.read(path))
    found = [vocabulary.encode(b"")]
    pieces, missing = files.stream(path), limit
    if isinstance(vocabulary, WordVocabulary):
        closed = ((0, piece) for piece in chain(pieces, [b" "]))
        for _, text in _whole_words(closed, str(path), ["the text"]):
            found.append(vocabulary.encode_text(text, missing))
            missing -= len(found[-1])
            if not missing:
                break
        return np.concatenate(found)
    for piece in pieces:
        while piece and missing:  # a vocabulary may drop some bytes
            found.append(vocabulary.encode(piece[:missing]))
            piece = piece[missing:]
            missing -= len(found[-1])
        if not missing:
            break
    return np.concatenate(found)
