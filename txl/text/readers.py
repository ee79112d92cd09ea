"""Readers of text sources (a file, an archive or a folder): they yield the splits train, valid and
test in pieces, in memory that does not grow."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from txl.errors import TxlError
from txl.text import files
from txl.text.files import Contents, Watch

SPLITS = ("train", "valid", "test")
LEAST_BYTES = 60  # gives each of the 90/5/5 percent some bytes
Layout = tuple[str, str, str]  # a pattern for each split, matched with the whole path inside a folder
Pieces = Iterator[tuple[int, bytes]]
"""Text and the split it belongs to: 0 train, 1 valid, 2 test."""
_NOT_TEXTS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """An existing path, or None for Python's standard library, with its properties computed
    once."""

    path: Path | None
    watch: Watch = lambda count: None

    def __post_init__(self) -> None:
        """Raise TxlError if the path does not exist or is a prepared corpus."""
        if self.path is None:
            return
        if (self.path / "corpus.json").is_file():
            raise TxlError(f"{self.path}: is a prepared corpus already; pass the text it was made from")
        if not self.path.exists():
            raise TxlError(f"{self.path}: no such file or folder")

    def __str__(self) -> str:
        return "the Python standard library" if self.path is None else str(self.path)

    @property
    def folder(self) -> Path | None:
        """The folder, or None if the source is a file."""
        if self.path is None:
            return Path(sysconfig.get_paths()["stdlib"])
        return self.path if self.path.is_dir() else None

    @property
    def file(self) -> Path:
        """The file; raises TxlError if the source is a folder."""
        if self.path is None or self.path.is_dir():
            raise TxlError(f"{self}: is a folder; a file is needed")
        return self.path

    @cached_property
    def contents(self) -> Contents:
        """The contents of the file; errors as in `files.look`."""
        return files.look(self.file, self.watch)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.file.stat().st_size


class Reader(Protocol):
    """A source whose splits can be read repeatedly.

    If lines are closed, each file and each split ends with a line end.
    """

    @property
    def description(self) -> str: ...

    @property
    def size(self) -> int:
        """Number of bytes that one pass reads from disk."""
        ...

    def pieces(self, watch: Watch) -> Pieces:
        """Yield (split, bytes) in pieces; raise TxlError if the text is damaged."""
        ...


@dataclass(frozen=True)
class CutFile:
    """A file cut at two places into three splits.

    Attributes:
        ends: byte offsets at which train and valid end.
        lines: move the cuts to the next line ends, and close the last line.
        strip: remove white space at both ends of each split.
    """

    source: Source
    description: str
    ends: tuple[int, int]
    lines: bool = False
    strip: bool = False

    @property
    def size(self) -> int:
        return self.source.size

    def pieces(self, watch: Watch) -> Pieces:
        text = files.pieces(self.source.file, watch)
        if self.lines:
            return _with_all(_cut_at(_closed(text), self.ends, True), self.description)
        parts = _cut_at(text, self.ends, False)
        return _stripped(parts) if self.strip else parts


@dataclass(frozen=True)
class Folder:
    """Files of a folder, each of which belongs to one split."""

    description: str
    files: list[tuple[int, Path]]
    lines: bool

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self, watch: Watch) -> Pieces:
        for split, path in self.files:
            yield from _in_split(split, files.pieces(path, watch), self.lines, str(path))


@dataclass(frozen=True)
class Archive:
    """Files of an archive whose names tell their split."""

    source: Source
    description: str
    layout: Layout
    lines: bool

    @property
    def size(self) -> int:
        return self.source.size

    def pieces(self, watch: Watch) -> Pieces:
        for name, pieces in files.members(self.source.file, watch):
            split = _split_of(name, self.layout)
            if split is not None:
                yield from _in_split(split, pieces, self.lines, f"{self.source}: {name}")


def _in_split(split: int, pieces: Iterable[bytes], lines: bool, what: str) -> Pieces:
    """Yield a file's pieces for a split; raise TxlError if it is not text, such as an image among
    text files."""
    for piece in _closed(pieces) if lines else pieces:
        if b"\0" in piece:
            raise TxlError(f"{what}: is no text (it holds a zero byte); take it out, or pass the texts alone")
        yield split, piece


def named(
    source: Source, layouts: Iterable[Layout], *, lines: bool, deep: bool, several: bool = False
) -> Folder | Archive:
    """Find the files of the first layout that has all three splits.

    Args:
        deep: also search subfolders.
        several: a split may have more than one file; those of a folder are ordered by name.

    Raises:
        TxlError: no layout has all splits, or a split has too many files; the message names them.
    """
    folder = source.folder
    if folder is None:
        names = source.contents.names or []
    else:
        paths = folder.rglob("*") if deep else folder.iterdir()
        names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
    layouts = list(layouts)
    for layout in layouts:
        if not has_all(names, layout):
            continue
        found = [(split, name) for name in names if (split := _split_of(name, layout)) is not None]
        for n in range(3):
            double = [name for split, name in found if split == n]
            if len(double) > 1 and not several:
                raise TxlError(f"{source}: holds {len(double)} files for {SPLITS[n]}: {', '.join(double[:3])}")
        description = f"{source} (its files say their split)"
        if folder is None:
            return Archive(source, description, layout, lines)
        return Folder(description, sorted((split, folder / name) for split, name in found), lines)
    wanted = "; or ".join(", ".join(map(_readable, layout)) for layout in layouts)
    raise TxlError(f"{source}: its files must be {wanted}")


def has_all(names: Iterable[str], layout: Layout) -> bool:
    """Whether files of these names make up all three splits."""
    return {_split_of(name, layout) for name in names} >= {0, 1, 2}


def deal(source: Source) -> Folder:
    """Distribute the files of a folder 90/5/5: in order of a hash of their paths, each goes to the
    split that lags most.

    Raises:
        TxlError: there are too few files, or a split would get none.
    """
    texts = _texts_of(source)
    if len(texts) < 3:
        raise TxlError(f"{source}: {len(texts)} text files found, at least 3 are needed (train, valid, test)")
    shares, sizes = (0.90, 0.05, 0.05), [0, 0, 0]
    total = sum(size for _, size in texts)
    dealt = []
    for path, size in texts:
        missing = [share * total - have for share, have in zip(shares, sizes, strict=True)]
        into = max(range(3), key=lambda i: missing[i] / shares[i])
        dealt.append((into, path))
        sizes[into] += size
    if not all(sizes):
        raise TxlError(f"{source}: its files are too few or too uneven to deal out 90/5/5; pass one file instead")
    return Folder(f"{source}, {len(texts)} files dealt out 90/5/5", dealt, lines=True)


def _texts_of(source: Source) -> list[tuple[Path, int]]:
    """List the files of a folder with their sizes, without hidden and empty ones, in order of a
    hash of their paths. For the standard library: its modules without their tests."""
    folder = source.folder
    assert folder is not None
    found = []
    for path in folder.rglob("*" if source.path else "*.py"):
        name = path.relative_to(folder)
        skipped = any(part.startswith(".") for part in name.parts) if source.path else _NOT_TEXTS & set(name.parts)
        if not skipped and path.is_file() and not path.is_symlink() and path.stat().st_size:
            found.append((path, path.stat().st_size))
    # By hash, since in order of size the small splits would get only similar files.
    return sorted(found, key=lambda it: hashlib.sha256(os.fsencode(it[0].relative_to(folder).as_posix())).digest())


def cut(source: Source, *, lines: bool) -> CutFile:
    """Cut a file 90/5/5 by bytes; raise TxlError if it is too short."""
    form, _, _, size = source.contents
    if not size:
        raise TxlError(f"{source}: the file is empty")
    if size < LEAST_BYTES:
        raise TxlError(f"{source}: {size} bytes are too few to split 90/5/5; at least {LEAST_BYTES} are needed")
    how = (f"{form}; " if form else "") + "split 90/5/5 by bytes" + (", at line ends" if lines else "")
    return CutFile(source, f"{source} ({how})", (size - 2 * (size // 20), size - size // 20), lines=lines)


def _closed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces, plus a line end if there is text and its last line has none."""
    last = b"\n"
    for piece in pieces:
        yield piece
        last = piece[-1:] or last
    if last != b"\n":
        yield b"\n"


def _cut_at(pieces: Iterable[bytes], ends: tuple[int, int], lines: bool) -> Pieces:
    """Divide a text into three splits, the first two of which end at these byte offsets.

    lines: move each cut to the next line end.
    """
    split, at = 0, 0
    for piece in pieces:
        while split < 2 and at + len(piece) >= ends[split]:
            stop = max(ends[split] - at, 0)
            if lines:
                stop = piece.find(b"\n", max(stop - 1, 0)) + 1
                if not stop:
                    break
            if stop:
                yield split, piece[:stop]
            split, at, piece = split + 1, at + stop, piece[stop:]
        if piece:
            yield split, piece
        at += len(piece)


def _with_all(parts: Pieces, what: str) -> Pieces:
    """Yield the splits of a text cut at line ends; raise TxlError if it has too few lines for all
    three."""
    last = lines = returns = 0
    for last, piece in parts:
        lines, returns = lines + piece.count(b"\n"), returns + piece.count(b"\r")
        yield last, piece
    if lines and last < len(SPLITS) - 1:
        how = (
            "its lines end with CR alone; make them end with LF: tr '\\r' '\\n' < FILE > NEW"
            if returns > lines
            else "break them into more (fold -s -w 1000 FILE > NEW), or pass a folder with train.txt, valid.txt and test.txt"
        )
        raise TxlError(f"{what}: the {SPLITS[last + 1]} split is empty, since the text has {lines} line(s) only; {how}")


def _stripped(pieces: Pieces) -> Pieces:
    """Yield the splits without the white space at their ends."""
    current, started, held = -1, False, b""
    for split, piece in pieces:
        if split != current:
            current, started, held = split, False, b""
        text = held + piece if started else piece.lstrip()
        body = text.rstrip()
        started, held = started or bool(body), text[len(body) :]
        if body:
            yield split, body


def _split_of(name: str, layout: Layout) -> int | None:
    return next((n for n, pattern in enumerate(layout) if re.fullmatch(f"(.*/)?{pattern}", name)), None)


def _readable(pattern: str) -> str:
    return pattern.replace("\\", "").replace("(?:", "(").replace(".*", "*")
