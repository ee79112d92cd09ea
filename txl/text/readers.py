"""What a user passes as a text: a file, an archive or a folder; read as splits, pieces of train,
valid and test, in memory that does not grow."""

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
from txl.text.files import Stream, Watch, compression

SPLITS = ("train", "valid", "test")
LEAST_BYTES = 60  # so that each of 90/5/5 gets some
Layout = tuple[str, str, str]  # for each split, a pattern of the whole path inside a folder
Pieces = Iterator[tuple[int, bytes]]
"""Text and the split it belongs to: 0 train, 1 valid, 2 test."""
_HEAD_BYTES = 8192
_NOT_TEXTS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """A path that exists, or None for Python's standard library; what it is, looked up once."""

    path: Path | None
    watch: Watch = lambda count: None

    def __post_init__(self) -> None:
        """Raises TxlError: nothing is there, or it is a prepared corpus."""
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
        """The folder it is, or None."""
        if self.path is None:
            return Path(sysconfig.get_paths()["stdlib"])
        return self.path if self.path.is_dir() else None

    @property
    def file(self) -> Path:
        """The file it is; TxlError if it is a folder."""
        if self.path is None or self.path.is_dir():
            raise TxlError(f"{self}: is a folder; a file is needed")
        return self.path

    @cached_property
    def names(self) -> list[str] | None:
        """Names in an archive of several files; None for anything else."""
        return None if self.folder else files.names(self.file, self.watch)

    @cached_property
    def text(self) -> tuple[str, str | None, int]:
        """Name that a file was packed under, its compression, its bytes without it."""
        with Stream(self.file, self.watch) as stream:
            if stream.compression is None:
                return stream.name, None, self.file.stat().st_size
            return stream.name, stream.compression, sum(map(len, stream.pieces()))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.stat().st_size


class Reader(Protocol):
    """A source whose splits can be read again and again.

    Where lines are closed, each file and each split ends with a line end.
    """

    @property
    def description(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes that one reading takes from disk."""
        ...

    def pieces(self, watch: Watch) -> Pieces:
        """The text; TxlError if it is damaged."""
        ...


@dataclass(frozen=True)
class CutFile:
    """One file, cut at two places.

    Attributes:
        ends: bytes before the end of train and of valid.
        lines: cut at the line ends that follow, and close the last line.
        strip: drop white space at both edges of each part.
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
        with Stream(self.source.file, watch) as stream:
            parts = _cut_at(_closed(stream.pieces()) if self.lines else stream.pieces(), self.ends, self.lines)
            yield from _stripped(parts) if self.strip else parts


@dataclass(frozen=True)
class Folder:
    """Files of a folder, each wholly in one split."""

    description: str
    files: list[tuple[int, Path]]
    lines: bool

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self, watch: Watch) -> Pieces:
        for split, path in self.files:
            with Stream(path, watch) as stream:
                yield from _in_split(split, stream.pieces(), self.lines)


@dataclass(frozen=True)
class Archive:
    """Files of an archive whose names say their split."""

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
                yield from _in_split(split, pieces, self.lines)


def _in_split(split: int, pieces: Iterable[bytes], lines: bool) -> Pieces:
    return ((split, piece) for piece in (_closed(pieces) if lines else pieces))


def named(
    source: Source, layouts: Iterable[Layout], *, lines: bool, deep: bool, several: bool = False
) -> Folder | Archive:
    """The files of the first layout that has all three splits.

    Args:
        deep: look in the folders of a folder too.
        several: more than one file may belong to a split; a folder's are taken by name.

    Raises:
        TxlError: no layout has them all, or one file too many, which are named.
    """
    folder = source.folder
    if folder is None:
        names = source.names or []
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
    """The texts of a folder, 90/5/5: by a hash of their paths, each to the split most behind.

    Raises:
        TxlError: there are too few, or a split would get none.
    """
    texts, packed = _texts_of(source)
    packed_files = f"{packed} compressed file{'s' if packed > 1 else ''}"
    left_out = f"; {packed_files} left out, decompress to include" if packed else ""
    if len(texts) < 3:
        found = f"{len(texts)} text files found, at least 3 are needed (train, valid, test)"
        raise TxlError(f"{source}: {found}{left_out}")
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
    return Folder(f"{source}, {len(texts)} files dealt out 90/5/5{left_out}", dealt, lines=True)


def _texts_of(source: Source) -> tuple[list[tuple[Path, int]], int]:
    """The text files of a folder and their sizes, in the order of a hash of their paths; and how
    many compressed ones there are. Of the standard library, its modules without their tests."""
    folder, texts, packed = source.folder, [], 0
    assert folder is not None
    skipped = _NOT_TEXTS if source.path is None else set()
    for path in sorted(folder.rglob("*")):
        if source.path is None and (path.suffix != ".py" or skipped & set(path.relative_to(folder).parts)):
            continue
        if path.is_symlink() or not path.is_file():
            continue
        try:
            kind, size = _look(path)
        except OSError:
            continue  # an unreadable file among readable ones is not the corpus's problem
        packed += kind == "compressed"
        if kind == "text":
            texts.append((path, size))
    # By hash, since largest first would starve the small splits of variety.
    texts.sort(key=lambda text: hashlib.sha256(os.fsencode(text[0].relative_to(folder).as_posix())).digest())
    return texts, packed


def _look(path: Path) -> tuple[str, int]:
    """Whether a file is text, compressed or neither, and its size with a line end."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if compression(head):
            return "compressed", 0
        if b"\0" in head:
            return "binary", 0
        piece = head
        while piece and not piece.strip():
            piece = file.read(_HEAD_BYTES)
        if not piece:
            return "blank", 0
        size = file.seek(0, os.SEEK_END)
        file.seek(-1, os.SEEK_END)
        return "text", size + (file.read(1) != b"\n")


def cut(source: Source, *, lines: bool) -> CutFile:
    """A file cut 90/5/5 by bytes; TxlError if it is too short."""
    _, compression, size = source.text
    if not size:
        raise TxlError(f"{source}: the file is empty")
    if size < LEAST_BYTES:
        raise TxlError(f"{source}: {size} bytes are too few to split 90/5/5; at least {LEAST_BYTES} are needed")
    how = (f"{compression}; " if compression else "") + "split 90/5/5 by bytes" + (", at line ends" if lines else "")
    return CutFile(source, f"{source} ({how})", (size - 2 * (size // 20), size - size // 20), lines=lines)


def _closed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """With a line end after the last line, if there is any text."""
    last = b"\n"
    for piece in pieces:
        yield piece
        last = piece[-1:] or last
    if last != b"\n":
        yield b"\n"


def _cut_at(pieces: Iterable[bytes], ends: tuple[int, int], lines: bool) -> Pieces:
    """Three splits of a text, of which the first two end after so many bytes.

    lines: or at the line end that follows.
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


def _stripped(pieces: Pieces) -> Pieces:
    """Without the white space at the edges of each split."""
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
