"""Files as text, in memory that does not grow with them: compressed ones are decompressed and
archives walked on the way, told by their first bytes, not their names."""

import bz2
import gzip
import importlib
import io
import lzma
import os
import re
import select
import stat
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any

from txl.errors import TxlError
from txl.paths import AnyPath

LARGEST_BYTES = 2_000_000_000  # of what is read at once: prompts, texts to score
PIECE_BYTES = 1 << 20
PATIENCE_S = 30.0  # for the first byte of a pipe
_HEAD_BYTES = 512
_MAGIC = {
    "bzip2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    "gzip": rb"\x1f\x8b\x08",
    "xz": rb"\xfd7zXZ\0|\]\0\0..\xff{8}",
    "zip": rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "7z": rb"7z\xbc\xaf\x27\x1c",
    "compress": rb"\x1f\x9d",
    "lz4": rb"\x04\x22\x4d\x18",
    "lzip": rb"LZIP\x01",
    "rar": rb"Rar!\x1a\x07",
}
_FORMATS = {name: re.compile(magic, re.DOTALL) for name, magic in _MAGIC.items()}
_READABLE = ("bzip2", "gzip", "xz", "zip", "zstd")
_TAR_DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError)

Watch = Callable[[int], None]
"""Takes how many more bytes of a file have been read."""
Member = tuple[str, Iterator[bytes]]  # the pieces are read before the next member is asked for


def compression(data: bytes) -> str | None:
    """The format of compressed data or of an archive by its first 512 bytes; None for all else."""
    found = next((name for name, magic in _FORMATS.items() if magic.match(data)), None)
    return "tar" if found is None and _is_tar(data) else found


def _is_tar(data: bytes) -> bool:
    """By the checksum of its first header, since the oldest kind has no magic bytes."""
    try:
        tarfile.TarInfo.frombuf(data[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def read(path: AnyPath) -> bytes:
    """All of a file, decompressed if it is bzip2, gzip, xz, zstd, or a zip of one file.

    Raises:
        TxlError: it cannot be read or decompressed, is truncated or damaged, is larger than
            LARGEST_BYTES without its compression, is an archive of several files or encrypted, or
            is compressed in another way or twice.
    """
    return b"".join(pieces(path))


def pieces(path: AnyPath) -> Iterator[bytes]:
    """The pieces that `read` joins, read as they are asked for; errors as there."""
    path = Path(path)
    try:
        kind = path.stat().st_mode
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(kind) and not stat.S_ISFIFO(kind) and not stat.S_ISDIR(kind):
        raise TxlError(f"{path}: is a device or a socket; a file or a pipe is needed")
    if stat.S_ISFIFO(kind):
        yield from _pipe_pieces(path)
    else:
        with Stream(path) as stream:
            yield from _limited(path, stream)


def _limited(path: Path, stream: "Stream") -> Iterator[bytes]:
    """The pieces of a stream; TxlError where a compressed one is a decompression bomb."""
    size = 0
    for piece in stream.pieces():
        size += len(piece)
        if stream.compression and size > LARGEST_BYTES:
            raise TxlError(
                f"{path}: holds more than {LARGEST_BYTES / 1e9:g} GB without its compression; "
                "if it is meant to, decompress it and pass the plain file"
            )
        yield piece


def _pipe_pieces(path: Path) -> Iterator[bytes]:
    """What is written to a pipe; a compressed text is decompressed when all of it is there."""
    read = _read_pipe(path)
    first = next(read, b"")
    while len(first) < _HEAD_BYTES and (more := next(read, b"")):
        first += more
    if compression(first[:_HEAD_BYTES]) is None:
        yield first
        yield from read
        return
    with Stream(path, file=io.BytesIO(first + b"".join(read))) as stream:
        yield from _limited(path, stream)


def _read_pipe(path: Path) -> Iterator[bytes]:
    """What is written to a pipe, up to LARGEST_BYTES. Opened without waiting: a named pipe without
    a writer would block for ever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        size, began = 0, time.monotonic()
        while True:
            ready, _, _ = select.select([descriptor], [], [], 0.2)
            piece = os.read(descriptor, PIECE_BYTES) if ready else None
            if piece:
                size += len(piece)
                if size > LARGEST_BYTES:
                    raise TxlError(f"{path}: a pipe of more than {LARGEST_BYTES / 1e9:g} GB; write it to a file")
                yield piece
            elif piece is not None and size:  # the writer is done
                return
            elif time.monotonic() - began > PATIENCE_S and not size:
                raise TxlError(f"{path}: is a pipe, and nobody wrote to it for {PATIENCE_S:g} seconds")
            elif piece is not None:
                time.sleep(0.05)  # no writer yet: select does not wait
    finally:
        os.close(descriptor)


class Stream:
    """A file read in pieces, decompressed on the way, in memory that does not grow with it.

    Attributes:
        compression: as `compression` finds it. A tar archive is read as it is.
        inside: what the decompressed data is itself, as `compression` finds it.
        name: the name the text was packed under, else the file's.
    """

    def __init__(self, path: AnyPath, watch: Watch = lambda count: None, file: IO[bytes] | None = None) -> None:
        """Opens it.

        file: what is in it, where that was read already.

        Raises:
            TxlError: as `read` without its limit; or it is no regular file, which can be read but
                once.
        """
        self.path, self._watch, self._seen = Path(path), watch, 0
        if file is None and self.path.exists() and not self.path.is_file():
            raise TxlError(f"{path}: is no regular file; it is read more than once, so write it to one first")
        try:
            self._raw = self.path.open("rb") if file is None else file
            head = self._raw.read(_HEAD_BYTES)
            self._raw.seek(0)
        except OSError as error:
            raise TxlError(f"{path}: cannot be read: {error.strerror}") from error
        self._stream: IO[bytes] = self._raw
        self.name, self.compression, self.inside, self._head = self.path.name, compression(head), None, b""
        try:
            if self.compression is None or self.compression == "tar":
                self.inside = self.compression
            elif self.compression not in _READABLE:
                raise TxlError(f"{path}: is {self.compression} data, not text; unpack it first")
            else:
                with _naming_damage(self.compression, self.path):
                    self._stream, self.name = _decompressed(self.compression, self._raw, self.path)
                head = self.read(_HEAD_BYTES)
                self.inside, self._head = compression(head), head
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._raw.close()

    def read(self, count: int) -> bytes:
        """At most `count` bytes more, none at the end; TxlError if they are damaged."""
        head, self._head = self._head, b""
        if head:
            return head
        with _naming_damage(self.compression, self.path):
            data = self._stream.read(count)
        position = self._raw.tell()
        self._watch(max(position - self._seen, 0))
        self._seen = max(position, self._seen)
        return data

    def pieces(self) -> Iterator[bytes]:
        """The rest of the text; TxlError if it is compressed twice or is an archive."""
        if self.inside == "tar" and self.compression == "tar":
            raise TxlError(f"{self.path}: is tar data, not text; unpack it first")
        if self.inside is not None:
            raise TxlError(
                f"{self.path}: holds {self.inside} data within {self.compression}, not text; unpack it first"
            )
        while piece := self.read(PIECE_BYTES):
            yield piece


@contextmanager
def _naming_damage(found: str | None, path: Path) -> Iterator[None]:
    """Turns what decompressors raise into one line that names the file."""
    try:
        yield
    except _damage(found, path) as error:
        if found is None:
            raise TxlError(f"{path}: cannot be read: {error}") from error
        raise TxlError(f"{path}: its {found} data is truncated or damaged: {error}") from error


def _decompressed(found: str, file: IO[bytes], path: Path) -> tuple[IO[bytes], str]:
    """The decompressed stream of a file, and the name of what it holds; path: for messages."""
    if found == "zip":
        return _open_zip(file, path)
    if found == "zstd":
        return _zstd(path).open(file), path.name
    openers: dict[str, Any] = {"bzip2": bz2.open, "gzip": gzip.open, "xz": lzma.open}
    return openers[found](file), path.name


def _open_zip(file: IO[bytes], path: Path) -> tuple[IO[bytes], str]:
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            names = ", ".join(repr(member.filename) for member in members[:3])
            more = ", .." if len(members) > 3 else ""
            raise TxlError(
                f"{path}: the zip archive holds {len(members)} files ({names}{more}) and not one; "
                "unpack it and pass the folder"
            )
        if members[0].flag_bits & 1:
            raise TxlError(f"{path}: the zip archive is encrypted; unpack it first")
        return archive.open(members[0]), PurePosixPath(members[0].filename).name


def _zstd(path: Path) -> Any:
    """The standard library's module from Python 3.14 on, or its backport.

    The zstandard package is not used: it takes a truncated file for a whole one.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise TxlError(f"{path}: is zstd data, which takes a package: pip install backports.zstd")


def _damage(found: str | None, path: Path) -> tuple[type[Exception], ...]:
    """What the decompressors raise. NotImplementedError: a method of zip that Python lacks."""
    common = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)
    return (*common, _zstd(path).ZstdError) if found == "zstd" else common


def members(path: AnyPath, watch: Watch = lambda count: None) -> Iterator[Member]:
    """Names and contents of the files in a zip or (compressed) tar archive, in its order.

    Raises:
        TxlError: it is neither, encrypted, truncated or damaged; the last two when it is read.
    """
    path = Path(path)
    if _is_zip(path):
        yield from _zip_members(path, watch)
        return
    with Stream(path, watch) as stream:
        if stream.inside != "tar":
            raise TxlError(f"{path}: is no archive")
        yield from _tar_members(stream)


def names(path: AnyPath, watch: Watch = lambda count: None) -> list[str] | None:
    """Names of the files in an archive; None for anything else and for a zip of one file."""
    path = Path(path)
    if not _is_zip(path):
        with Stream(path, watch) as stream:
            return [name for name, _ in _tar_members(stream)] if stream.inside == "tar" else None
    with _naming_damage("zip", path), zipfile.ZipFile(path) as archive:
        found = [member.filename for member in archive.infolist() if not member.is_dir()]
    return None if len(found) == 1 else found


def _is_zip(path: Path) -> bool:
    if path.exists() and not path.is_file():
        return False  # a pipe keeps its first bytes
    try:
        with path.open("rb") as file:
            return compression(file.read(_HEAD_BYTES)) == "zip"
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error


def _zip_members(path: Path, watch: Watch) -> Iterator[Member]:
    with _naming_damage("zip", path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.flag_bits & 1:
                raise TxlError(f"{path}: the zip archive is encrypted; unpack it first")
            if not member.is_dir():
                yield member.filename, _zip_pieces(path, archive, member, watch)


def _zip_pieces(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, watch: Watch) -> Iterator[bytes]:
    with _naming_damage("zip", path):
        file = archive.open(member)
    with file:
        seen = 0
        while True:
            with _naming_damage("zip", path):
                piece = file.read(PIECE_BYTES)
            if not piece:
                return
            # The share of the compressed bytes, for which zipfile has no count.
            done = member.compress_size * file.tell() // max(member.file_size, 1)
            watch(done - seen)
            seen = done
            yield piece


class _Measured:
    """A stream that knows where its last byte that is not zero is: tarfile may stop before it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.size, self.last = stream, 0, 0

    def read(self, count: int) -> bytes:
        piece = self.stream.read(count)
        kept = len(piece.rstrip(b"\0"))
        if kept:
            self.last = self.size + kept
        self.size += len(piece)
        return piece


def _tar_pieces(file: IO[bytes], damaged: str) -> Iterator[bytes]:
    try:
        while piece := file.read(PIECE_BYTES):
            yield piece
    except _TAR_DAMAGE as error:
        raise TxlError(f"{damaged}: {error}") from error


def _tar_members(stream: Stream) -> Iterator[Member]:
    measured = _Measured(stream)
    damaged = f"{stream.path}: its tar data is truncated or damaged"
    try:
        with tarfile.open(fileobj=measured, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield member.name, _tar_pieces(file, damaged)
            end = archive.offset
    except _TAR_DAMAGE as error:
        raise TxlError(f"{damaged}: {error}") from error
    while measured.read(PIECE_BYTES):  # so that the checksum of its compression is compared
        pass
    if measured.size <= end or measured.last > end:
        raise TxlError(f"{damaged}: the blocks of zeros that end an archive are not after its last file")
