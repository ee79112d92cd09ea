"""Corpora on disk: memory-mapped tokens with their vocabulary."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.errors import TxlError
from txl.fields import from_values
from txl.paths import AnyPath, new_folder, open_regular, read_bytes, read_text
from txl.text.datasets import RULES, PrepareOptions, choose
from txl.text.preparing import FORMAT, META, NAMES, VOCABULARY, checksum, make_vocabulary, write_corpus
from txl.text.readers import SPLITS, Reader, Source
from txl.text.vocabulary import Tokens, Vocabulary, from_file, token_dtype

Progress = Callable[[str, int, int], None]
"""Takes what is being done, the bytes of text read for it, and how many there are (0: unknown)."""

_AUTO = PrepareOptions()
_AGAIN = "remove the folder, then run `txl prepare` again"
BLOCK_TOKENS = 1 << 26  # tokens that are compared at once


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        train, valid, test: tokens, memory maps [n] of uint8, uint16 or uint32.
        source: a line that describes the source. rule: name of the rule that prepared it.
        fingerprint: SHA-256 of vocabulary and tokens. sha256: that of each file's content, by its
            stem.
    """

    folder: Path
    vocabulary: Vocabulary
    train: Tokens
    valid: Tokens
    test: Tokens
    source: str
    fingerprint: str
    sha256: dict[str, str]
    rule: str

    def split(self, name: str) -> Tokens:
        if name not in SPLITS:
            raise TxlError(f"split must be one of {', '.join(SPLITS)}, got {name!r}")
        tokens: Tokens = getattr(self, name)
        return tokens

    def sentences(self) -> npt.NDArray[np.int64] | None:
        """Return the index of each training sentence's first token, if the sentences are to be
        shuffled (see `Streams`); else None."""
        if self.rule not in RULES or not RULES[self.rule].shuffled:
            return None
        blocks = range(0, len(self.train), BLOCK_TOKENS)
        ends = [np.flatnonzero(self.train[n : n + BLOCK_TOKENS] == self.vocabulary.start) + n for n in blocks]
        return np.concatenate(ends)[:-1]  # the last one opens none

    def verify(self, *splits: str) -> None:
        """Read the given splits, or all, and compare their checksums.

        Raises:
            TxlError: a split's tokens differ from those that were prepared.
        """
        arrays: dict[str, Any] = {name: self.split(name) for name in splits or SPLITS}
        for name, array in arrays.items():
            if hashlib.sha256(array.data).hexdigest() != self.sha256[name]:
                raise TxlError(f"{self.folder / name}.bin is not what was prepared; {_AGAIN}")


@dataclass(frozen=True)
class Meta:
    """The contents of `corpus.json`."""

    format: int
    rule: str
    source: str
    vocabulary: dict[str, Any]
    sha256: dict[str, str]
    tokens: dict[str, int]


def prepare(
    source: AnyPath | None,
    folder: AnyPath,
    options: PrepareOptions = _AUTO,
    progress: Progress | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """Prepare a corpus in a new folder and open it. Memory does not grow with the text.

    The source is read two or three times. The folder is renamed into place at the very end, so an
    interrupted call leaves none.

    Args:
        folder: a folder that does not exist or is empty.
        source: a file, an archive or a folder; None for the standard library of this interpreter.
        vocabulary: the vocabulary to encode with; None to make one from the source.

    Raises:
        TxlError: the source is not as the rule requires, is too short, truncated or damaged; the
            vocabulary has another unit or lacks words of the source; or the folder exists already
            or cannot be written.
    """
    if source is not None and Path(source, META).is_file():
        raise TxlError(f"{source}: is a prepared corpus already; a text, a data set's archive or a folder is needed")
    found = Source(None if source is None else Path(source))
    done = total = 0  # bytes of text, of this reading and of the one before

    def watched(what: str) -> Reader:
        nonlocal done, total
        done, total = 0, done or reader.size

        def watch(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(what, done, total)

        return replace(reader, watch=watch)

    rule = choose(found, options)
    if vocabulary is not None and vocabulary.unit != rule.unit:
        raise TxlError(f"rule {rule.name} makes {rule.unit}, the vocabulary given is of {vocabulary.unit}")
    folder, reader = Path(folder), rule.read(found)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as made:
            if vocabulary is None:
                vocabulary = make_vocabulary(watched("counting"), rule, options)
            write_corpus(made, watched("encoding"), vocabulary, rule)
    except OSError as error:
        raise TxlError(f"{folder}: the corpus cannot be written: {error.strerror or error}") from error
    return load(folder)


def open_corpus(
    source: AnyPath | None,
    folder: AnyPath,
    options: PrepareOptions = _AUTO,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """Open a prepared corpus; any other source is first prepared in `folder`, inside a new run's,
    with the given options and vocabulary. A corpus there is of a run that was killed before its
    first checkpoint, and is replaced when the new one is complete."""
    folder = Path(folder)
    fresh = folder.with_name(f"{folder.name}.new")
    prepared = Path(source) if source is not None and Path(source, META).is_file() else None
    if _is_corpus(fresh) and not (prepared and fresh.samefile(prepared)):  # of a process that was killed here
        _remove(fresh)
    if prepared:
        return load(prepared)
    if not _is_corpus(folder):
        return prepare(source, folder, options, vocabulary=vocabulary)
    prepare(source, fresh, options, vocabulary=vocabulary)
    try:
        _remove(folder)
        fresh.rename(folder)
    except OSError as error:
        raise TxlError(f"{folder}: cannot be replaced by {fresh}: {error.strerror or error}") from error
    return load(folder)


def _is_corpus(folder: Path) -> bool:
    return (folder / META).is_file() and not folder.is_symlink()


def _remove(folder: Path) -> None:
    """Remove a corpus; raise OSError, with all of it in place, if the folder holds other files."""
    if any(file.name not in NAMES for file in folder.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def load(folder: AnyPath) -> Corpus:
    """Open a prepared corpus.

    Raises:
        TxlError: the folder holds no corpus, or one that is damaged or of an older format.
    """
    folder = Path(folder)
    if not (folder / META).is_file():
        raise TxlError(f"{folder}: not a prepared corpus ({META} is missing); run `txl prepare` first")
    try:
        values = json.loads(read_text(folder / META))
        if not isinstance(values, dict) or values.get("format") == FORMAT:
            return _opened(folder, values)
    except (TxlError, OSError, ValueError, KeyError, RecursionError) as error:
        raise TxlError(f"{folder}: the prepared corpus is damaged ({error}); {_AGAIN}") from error
    raise TxlError(f"{folder}: prepared in another version's format; {_AGAIN}")


def _opened(folder: Path, values: Any) -> Corpus:
    """Open the corpus in a folder; values: the parsed corpus.json.

    Raises:
        TxlError, KeyError, ValueError, OSError: the files do not match the values, or the values
            are damaged.
    """
    meta = from_values(Meta, values)
    files = {"vocabulary", *SPLITS}
    # Corpora that were prepared before this checksum existed have none.
    if meta.sha256.keys() != files and (meta.sha256.keys() != {*files, META} or meta.sha256[META] != checksum(values)):
        raise ValueError(f"{META} is not as it was written")
    content = read_bytes(folder / VOCABULARY)
    if hashlib.sha256(content).hexdigest() != meta.sha256["vocabulary"]:
        raise ValueError(f"{VOCABULARY} is not the one it was made with")
    vocabulary = from_file(content, meta.vocabulary)
    dtype = np.dtype(token_dtype(len(vocabulary)))
    train, valid, test = (_mapped(folder / f"{name}.bin", dtype, meta.tokens[name]) for name in SPLITS)
    hashes = {name: meta.sha256[name] for name in SPLITS}
    fingerprint = hashlib.sha256(content + b"".join(bytes.fromhex(hashes[name]) for name in SPLITS)).hexdigest()
    return Corpus(folder, vocabulary, train, valid, test, meta.source, fingerprint, hashes, meta.rule)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> Any:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != count * dtype.itemsize:
            raise ValueError(f"{path.name} has {size} bytes, not {count * dtype.itemsize}")
        return np.memmap(file, dtype=dtype, mode="r")


def as_tensor(tokens: Tokens) -> Tensor:
    """Copy tokens to an int64 tensor."""
    return torch.from_numpy(np.asarray(tokens).astype(np.int64))
