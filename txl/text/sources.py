"""What a user passes as a text: a file, an archive or a folder; the texts of a folder."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from txl.errors import TxlError
from txl.text import archives
from txl.text.compressed import compression
from txl.text.pieces import Stream, Watch

_HEAD_BYTES = 8192
_NOT_TEXTS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class TextFile(NamedTuple):
    """A file of plain text in a folder; size counts the line end it may lack."""

    path: Path
    size: int


class Found(NamedTuple):
    """The texts of a folder in the order of a hash of their paths, and the files left out."""

    texts: list[TextFile]
    compressed: int


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
        return None if self.folder else archives.names(self.file, self.watch)

    @cached_property
    def text(self) -> tuple[str, str | None, int]:
        """Of a file: the name it was packed under, its compression, its bytes without it."""
        with Stream(self.file, self.watch) as stream:
            if stream.compression is None:
                return stream.name, None, self.file.stat().st_size
            return stream.name, stream.compression, sum(map(len, stream.pieces()))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.file.stat().st_size


def texts_of(source: Source) -> Found:
    """The text files of a folder; of the standard library, its modules without their tests."""
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
            texts.append(TextFile(path, size))
    # By hash, since largest first would starve the small splits of variety.
    texts.sort(key=lambda text: hashlib.sha256(os.fsencode(text.path.relative_to(folder).as_posix())).digest())
    return Found(texts, packed)


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
