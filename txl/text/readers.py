"""Readers of text sources (a file, an archive or a folder): they yield the splits train, valid and
test in pieces, in memory that does not grow."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path, PurePath

from txl.errors import TxlError
from txl.text import files
from txl.text.files import Member

SPLITS = ("train", "valid", "test")
Layout = tuple[str, str, str]  # a shell's pattern for each split, matched with the end of the path inside a folder
Pieces = Iterator[tuple[int, bytes]]
"""Text and the split it belongs to: 0 train, 1 valid, 2 test."""
_NOT_TEXTS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Source:
    """An existing file or folder, or Python's standard library.

    Attributes:
        path: the path; that of the file for a folder of one file. given: the path that was given;
            None for the standard library.
    """

    def __init__(self, given: Path | None) -> None:
        """Raise TxlError if the path does not exist, or can be read only once."""
        self.given = given
        self.path = Path(sysconfig.get_paths()["stdlib"]) if given is None else given
        if not self.path.exists():
            raise TxlError(f"{self.path}: no such file or folder")
        if not (self.path.is_file() or self.path.is_dir()):
            raise TxlError(f"{self.path}: is no regular file; it is read more than once, so write it to one first")
        if self.path.is_dir() and len(self.names) == 1:
            self.path = self.path / self.names[0]
            del self.names  # become those in the file

    def __str__(self) -> str:
        return "the Python standard library" if self.given is None else str(self.given)

    @cached_property
    def names(self) -> list[str]:
        """Names of the files in a folder and its subfolders, or in an archive, without hidden ones;
        of the standard library, those of its modules without their tests. Errors as in
        `files.names`."""
        if not self.path.is_dir():
            return files.names(self.path)
        found = (path for path in self.path.rglob("*" if self.given else "*.py") if path.is_file())
        names = (path.relative_to(self.path) for path in found)
        if self.given is None:
            return sorted(name.as_posix() for name in names if not _NOT_TEXTS & set(name.parts))
        return sorted(name.as_posix() for name in names if not files.is_hidden(name.as_posix()))

    @cached_property
    def text_bytes(self) -> int:
        """Size of the text in a file or archive, without compression; errors as in
        `files.members`."""
        return sum(len(piece) for _, text in files.members(self.path) for piece in text)


@dataclass(frozen=True)
class Reader:
    """A source whose splits can be read repeatedly.

    Attributes:
        texts: yields names and contents of the files, of which one pass is made.
        splits: the split of each file; others are left out. None for one text that is cut.
        ends: byte offsets at which train and valid of a text that is cut end.
        size: bytes of all texts; 0 if they are not known before the texts are read.
        lines: close the last line of each file, and move the cuts to the next line ends.
        strip: remove white space at both ends of each split.
        watch: called with the number of bytes of each piece.
    """

    description: str
    texts: Callable[[], Iterator[Member]]
    splits: dict[str, int] | None = None
    ends: tuple[int, int] = (0, 0)
    size: int = 0
    lines: bool = False
    strip: bool = False
    watch: Callable[[int], None] = lambda count: None

    def pieces(self) -> Pieces:
        """Yield (split, bytes) in pieces; raise TxlError if the text is damaged."""
        for split, piece in self._pieces():
            self.watch(len(piece))
            yield split, piece

    def _pieces(self) -> Pieces:
        for name, text in self.texts():
            if self.splits is not None and name not in self.splits:
                continue
            closed = _closed(text) if self.lines else text
            if self.splits is not None:
                yield from ((self.splits[name], piece) for piece in closed)
            else:
                parts = _cut_at(closed, self.ends, self.lines)
                yield from _stripped(parts) if self.strip else parts


def named(source: Source, layouts: Iterable[Layout], *, lines: bool, several: bool = False) -> Reader | None:
    """Find the files of the first layout that has all three splits; None if there is none.

    Args:
        several: a split may have more than one file, in any folders; those of a folder are ordered
            by name. Otherwise the three files are in one folder, the outermost that has them.

    Raises:
        TxlError: a split has too many files; the message names them.
    """
    for layout in layouts:
        found = [(n, name) for name in source.names for n in range(3) if fits(name, layout[n])]
        found = found if several else _of_outermost(found)
        if {n for n, _ in found} != {0, 1, 2}:
            continue
        for n in range(3):
            double = [name for split, name in found if split == n]
            if len(double) > 1 and not several:
                raise TxlError(
                    f"{source}: holds {len(double)} files for {SPLITS[n]}, of which one is needed: {', '.join(double[:3])}"
                )
        description = f"{source} (its files say their split)"
        if source.path.is_dir():
            return _of_folder(source.path, description, sorted(found), lines)
        return Reader(description, partial(files.members, source.path), {name: n for n, name in found}, lines=lines)
    return None


def _of_outermost(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Keep, of files (split, name), those in folders that have all three splits, and of these the
    folders that are the least deep."""
    folders: dict[PurePath, list[tuple[int, str]]] = {}
    for n, name in found:
        folders.setdefault(PurePath(name).parent, []).append((n, name))
    whole = {folder: held for folder, held in folders.items() if {n for n, _ in held} == {0, 1, 2}}
    depth = min((len(folder.parts) for folder in whole), default=0)
    return [each for folder, held in whole.items() if len(folder.parts) == depth for each in held]


def fits(name: str, pattern: str) -> bool:
    """Whether a file's path ends as a pattern says."""
    return fnmatchcase(f"/{name}", f"*/{pattern}")


def _of_folder(folder: Path, description: str, found: list[tuple[int, str]], lines: bool) -> Reader:
    """Make a reader of files of a folder, (split, name) each, in this order."""

    def texts() -> Iterator[Member]:
        return ((name, files.pieces(folder / name)) for _, name in found)

    return Reader(description, texts, {name: n for n, name in found}, lines=lines)


def deal(source: Source) -> Reader:
    """Distribute the files of a folder, 90/5/5 if they are small: in order of a hash of their
    paths, each goes to the split that lags most. The description gives the shares, by the files'
    sizes.

    Raises:
        TxlError: there are too few files, a split would get none, or train no more than half.
    """
    texts = _texts_of(source)
    if len(texts) < 3:
        raise TxlError(f"{source}: {len(texts)} text files found, at least 3 are needed (train, valid, test)")
    shares, sizes = (0.90, 0.05, 0.05), [0, 0, 0]
    total = sum(size for _, size in texts)
    dealt = []
    for name, size in texts:
        missing = [share * total - have for share, have in zip(shares, sizes, strict=True)]
        into = max(range(3), key=lambda i: missing[i] / shares[i])
        dealt.append((into, name))
        sizes[into] += size
    got = "/".join(f"{round(100 * size / total, 1):g}" for size in sizes)
    if not all(sizes) or 2 * sizes[0] <= total:
        raise TxlError(
            f"{source}: its {len(texts)} text files are too few or too uneven to deal out 90/5/5 (train, valid and test "
            f"would get {got}); pass one file, or name three train.txt, valid.txt and test.txt"
        )
    return _of_folder(source.path, f"{source}, {len(texts)} files dealt out {got} by size", dealt, lines=True)


def _texts_of(source: Source) -> list[tuple[str, int]]:
    """List the files of a folder with their sizes, without symbolic links and empty ones, in order
    of a hash of their names."""
    paths = {name: source.path / name for name in source.names}
    found = [(name, path.stat().st_size) for name, path in paths.items() if not path.is_symlink()]
    found = [(name, size) for name, size in found if size]
    # By hash, since in order of size the small splits would get only similar files.
    return sorted(found, key=lambda it: hashlib.sha256(os.fsencode(it[0])).digest())


def cut(source: Source, *, lines: bool, strip: bool = False) -> Reader:
    """Cut a file, or the only one of an archive, 90/5/5 by bytes."""
    size, how = source.text_bytes, "split 90/5/5 by bytes" + (", at line ends" if lines else "")
    ends = (size - 2 * (size // 20), size - size // 20)
    return Reader(f"{source} ({how})", partial(files.members, source.path), None, ends, size, lines, strip)


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
