"""The second reading of a source: tokens written beside a corpus, which they replace at the end."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from txl.errors import TxlError
from txl.text.counting import whole_words
from txl.text.pieces import Watch
from txl.text.readers import SPLITS, Reader
from txl.text.rules import PrepareOptions, Rule
from txl.text.tokens import Tokens, token_dtype
from txl.text.vocabulary import Vocabulary, WordVocabulary

META, VOCABULARY, SENTENCES = "corpus.json", "vocabulary.txt", "sentences.bin"
_NAMES = (*(f"{split}.bin" for split in SPLITS), SENTENCES, VOCABULARY)
FORMAT = 3


@dataclass
class _Split:
    """A split while it is written."""

    file: IO[bytes]
    tokens: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def write(self, tokens: Tokens) -> None:
        self.file.write(tokens.data)
        self.hash.update(tokens.data)
        self.tokens += len(tokens)


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
                _temporary(folder, META).unlink(missing_ok=True)
                _write(folder, reader, vocabulary, rule, options, watch)
            except BaseException:
                with suppress(OSError):
                    for name in (META, *_NAMES):
                        _temporary(folder, name).unlink(missing_ok=True)
                    if fresh:
                        folder.rmdir()
                raise
            _swap(folder)
    except OSError as error:
        raise TxlError(f"{folder}: the corpus cannot be written: {error.strerror or error}") from error


def finish(folder: Path) -> None:
    """Puts a corpus into its place that was written whole by a process that died before it did so.

    Raises:
        TxlError: another process is at it. OSError: the folder cannot be written.
    """
    if (folder / META).exists() or not _temporary(folder, META).exists():
        return
    with _alone(folder), suppress(ValueError, KeyError, AttributeError):  # a file cut short ends nothing
        meta = json.loads(_temporary(folder, META).read_text(encoding="utf-8"))
        if meta["checksum"] == checksum(meta):
            _swap(folder)


def _swap(folder: Path) -> None:
    """A folder with corpus.json is whole; one with its temporary file is, too, after this."""
    (folder / META).unlink(missing_ok=True)
    meta = json.loads(_temporary(folder, META).read_text(encoding="utf-8"))
    if meta["sentences"] is None:
        (folder / SENTENCES).unlink(missing_ok=True)
    for name in _NAMES:
        if _temporary(folder, name).exists():
            _temporary(folder, name).replace(folder / name)  # whoever has the old one mapped keeps it
    _temporary(folder, META).replace(folder / META)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a folder against other preparations; the system lets go of it when a process ends.

    Raises:
        TxlError: another preparation is going on there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TxlError(f"{folder}: another process is preparing a corpus there") from error
        yield
    finally:
        os.close(descriptor)


def _temporary(folder: Path, name: str) -> Path:
    """One a folder, so that the next writing takes the place of one that was killed."""
    return folder / f".{name}.tmp"


def _write(
    folder: Path, reader: Reader, vocabulary: Vocabulary, rule: Rule, options: PrepareOptions, watch: Watch
) -> None:
    with ExitStack() as opened:  # closes all, whichever fails
        splits = [_Split(opened.enter_context(_temporary(folder, f"{split}.bin").open("wb"))) for split in SPLITS]
        sentences = opened.enter_context(_temporary(folder, SENTENCES).open("wb")) if rule.shuffled else None
        dtype = token_dtype(len(vocabulary))
        if sentences:
            splits[0].write(np.array([vocabulary.start], dtype))
        first, starts = 0, hashlib.sha256()
        for n, tokens in _encoded(reader, vocabulary, watch):
            if sentences and n == 0:
                bounds = np.flatnonzero(tokens == vocabulary.start) + splits[0].tokens
                entries = np.append(first, bounds[:-1]).astype(np.int64).data if len(bounds) else b""
                sentences.write(entries)
                starts.update(entries)
                first = int(bounds[-1]) if len(bounds) else first
            splits[n].write(tokens)
    for name, split in zip(SPLITS, splits, strict=True):
        if split.tokens <= (name == "train" and rule.shuffled):
            raise TxlError(f"{reader.description}: the {name} split is empty")
    content = vocabulary.to_file()
    hashes = {name: split.hash for name, split in zip(SPLITS, splits, strict=True)}
    digests = b"".join([content, *(hash.digest() for hash in hashes.values())])
    if sentences:
        hashes["sentences"] = starts
    meta = {
        "format": FORMAT,
        "rule": rule.name,
        "newline": options.newline,
        "source": reader.description,
        "vocabulary": vocabulary.settings(),
        "sha256": {"vocabulary": hashlib.sha256(content).hexdigest()}
        | {name: hash.hexdigest() for name, hash in hashes.items()},
        "dtype": np.dtype(dtype).name,
        "tokens": {name: split.tokens for name, split in zip(SPLITS, splits, strict=True)},
        "sentences": _temporary(folder, SENTENCES).stat().st_size // 8 if rule.shuffled else None,
        "fingerprint": hashlib.sha256(digests).hexdigest(),
    }
    _temporary(folder, VOCABULARY).write_bytes(content)
    meta["checksum"] = checksum(meta)
    _temporary(folder, META).write_text(json.dumps(meta, indent=2), encoding="utf-8")


def checksum(meta: dict[str, Any]) -> str:
    """Of all that `corpus.json` says."""
    said = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _encoded(reader: Reader, vocabulary: Vocabulary, watch: Watch) -> Iterator[tuple[int, Tokens]]:
    """Tokens piece by piece."""
    pieces = reader.pieces(watch)
    if isinstance(vocabulary, WordVocabulary):
        for n, text in whole_words(pieces, reader.description):
            yield n, vocabulary.encode_text(text)
        return
    for n, piece in pieces:
        yield n, vocabulary.encode(piece)
