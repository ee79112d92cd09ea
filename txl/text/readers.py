"""Sources read as splits: pieces of train, valid and test, in memory that does not grow."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from txl.errors import TxlError
from txl.text import archives
from txl.text.cutting import Pieces, closed, cut_at, stripped
from txl.text.pieces import Stream, Watch
from txl.text.sources import Source, TextFile, texts_of

SPLITS = ("train", "valid", "test")
LEAST_BYTES = 60  # so that each of 90/5/5 gets some
Layout = tuple[str, str, str]  # for each split, a pattern of the whole path inside a folder


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
            parts = cut_at(closed(stream.pieces()) if self.lines else stream.pieces(), self.ends, self.lines)
            yield from stripped(parts) if self.strip else parts


@dataclass(frozen=True)
class DealtFolder:
    """Text files, each wholly in one split; lines are closed."""

    description: str
    files: list[tuple[int, TextFile]]

    @property
    def size(self) -> int:
        return sum(text.size for _, text in self.files)

    def pieces(self, watch: Watch) -> Pieces:
        for split, text in self.files:
            with Stream(text.path, watch) as stream:
                yield from ((split, piece) for piece in closed(stream.pieces()))


@dataclass(frozen=True)
class NamedFiles:
    """Files of a folder or an archive whose names say their split."""

    source: Source
    description: str
    layout: Layout
    lines: bool
    files: list[tuple[int, Path]]  # of a folder

    @property
    def size(self) -> int:
        if self.source.folder is None:
            return self.source.size
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self, watch: Watch) -> Pieces:
        if self.source.folder is None:
            for name, pieces in archives.members(self.source.file, watch):
                split = _split_of(name, self.layout)
                if split is not None:
                    yield from ((split, piece) for piece in (closed(pieces) if self.lines else pieces))
            return
        for split, path in self.files:
            with Stream(path, watch) as stream:
                pieces = stream.pieces()
                yield from ((split, piece) for piece in (closed(pieces) if self.lines else pieces))


def named(source: Source, layouts: Iterable[Layout], *, lines: bool, deep: bool, several: bool = False) -> NamedFiles:
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
        files = [(split, name) for name in names if (split := _split_of(name, layout)) is not None]
        for n in range(3):
            double = [name for split, name in files if split == n]
            if len(double) > 1 and not several:
                raise TxlError(f"{source}: holds {len(double)} files for {SPLITS[n]}: {', '.join(double[:3])}")
        how = "its files say their split"
        inside = [] if folder is None else sorted((split, folder / name) for split, name in files)
        return NamedFiles(source, f"{source} ({how})", layout, lines, inside)
    wanted = "; or ".join(", ".join(map(_readable, layout)) for layout in layouts)
    raise TxlError(f"{source}: its files must be {wanted}")


def has_all(names: Iterable[str], layout: Layout) -> bool:
    """Whether files of these names make up all three splits."""
    return {_split_of(name, layout) for name in names} >= {0, 1, 2}


def deal(source: Source) -> DealtFolder:
    """The texts of a folder, 90/5/5: by a hash of their paths, each to the split most behind.

    Raises:
        TxlError: there are too few, or a split would get none.
    """
    texts, packed = texts_of(source)
    left_out = _left_out(packed)
    if len(texts) < 3:
        found = f"{len(texts)} text files found, at least 3 are needed (train, valid, test)"
        raise TxlError(f"{source}: {found}{left_out}")
    shares, sizes = (0.90, 0.05, 0.05), [0, 0, 0]
    total = sum(text.size for text in texts)
    files = []
    for text in texts:
        missing = [share * total - size for share, size in zip(shares, sizes, strict=True)]
        into = max(range(3), key=lambda i: missing[i] / shares[i])
        files.append((into, text))
        sizes[into] += text.size
    if not all(sizes):
        raise TxlError(f"{source}: its files are too few or too uneven to deal out 90/5/5; pass one file instead")
    return DealtFolder(f"{source}, {len(texts)} files dealt out 90/5/5{left_out}", files)


def cut(source: Source, *, lines: bool) -> CutFile:
    """A file cut 90/5/5 by bytes; TxlError if it is too short."""
    _, compression, size = source.text
    if not size:
        raise TxlError(f"{source}: the file is empty")
    if size < LEAST_BYTES:
        raise TxlError(f"{source}: {size} bytes are too few to split 90/5/5; at least {LEAST_BYTES} are needed")
    how = (f"{compression}; " if compression else "") + "split 90/5/5 by bytes" + (", at line ends" if lines else "")
    return CutFile(source, f"{source} ({how})", (size - 2 * (size // 20), size - size // 20), lines=lines)


def _left_out(packed: int) -> str:
    return f"; {packed} compressed file{'s' if packed > 1 else ''} left out, decompress to include" if packed else ""


def _split_of(name: str, layout: Layout) -> int | None:
    return next((n for n, pattern in enumerate(layout) if re.fullmatch(f"(.*/)?{pattern}", name)), None)


def _readable(pattern: str) -> str:
    return pattern.replace("\\", "").replace("(?:", "(").replace(".*", "*")
