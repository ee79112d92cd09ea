"""Text from plain, compressed and archived files (zip, tar) in memory that does not grow with them.
Formats are recognized by content, not by name."""

import bz2
import codecs
import gzip
import io
import lzma
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any

from txl.errors import TxlError
from txl.paths import AnyPath

LARGEST_BYTES = 2_000_000_000  # maximum size of a text, or of a pipe's data, that is held in memory at once
PIECE_BYTES = 1 << 20
_HEAD_BYTES = 16  # enough for every mark and magic number
_HEADER_BYTES = 1 << 20  # maximum size of a tar member's header: its name and attributes
MAX_FILES = 100_000  # in an archive
_OPENERS: dict[str, Any] = {"bzip2": bz2.open, "gzip": gzip.open, "xz": lzma.open}
_TARS = {None: "tar", "bzip2": "tar.bz2", "gzip": "tar.gz", "xz": "tar.xz"}  # an archive's name by its compression
_MAGIC = {
    "bzip2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "gzip": rb"\x1f\x8b\x08", "xz": rb"\xfd7zXZ\0",
    "zip": rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
}  # fmt: skip
_PACKED = re.compile(  # also zstd, 7z, compress, lz4, lzip, lzma and rar, which are not read
    b"|".join(_MAGIC.values()) + rb"|\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18|7z\xbc\xaf\x27\x1c|\x1f\x9d"
    rb"|\x04\x22\x4d\x18|LZIP\x01|\]\0\0..\xff{8}|Rar!\x1a\x07",
    re.DOTALL,
)
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32-LE's begins with UTF-16-LE's
_DAMAGE = (
    EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, struct.error, ValueError,
    IndexError, RuntimeError,
)  # fmt: skip

Member = tuple[str, Iterator[bytes]]  # the pieces must be read before the next member


def members(path: AnyPath) -> Iterator[Member]:
    """Yield names and contents of the files in an archive, in its order, without hidden ones; a
    file that is no archive is its own only member, and so is what a pipe gives until its writer
    closes it.

    Raises:
        TxlError: it cannot be read, or is neither a file nor a pipe, or not text, truncated,
            damaged or encrypted; or a pipe gives more than LARGEST_BYTES.
    """
    path = Path(path)
    with _naming(path), _opened(path) as file:
        head = file.read(_HEAD_BYTES)
        file.seek(0)
        form = next((form for form, magic in _MAGIC.items() if re.match(magic, head)), None)
        with _naming(path, form):
            if form == "zip":
                yield from _zip_members(file, path)
                return
            is_tar = _is_tar(_unpacked(file, form).read(tarfile.BLOCKSIZE))
            file.seek(0)
            if is_tar:
                yield from _tar_members(_unpacked(file, form), path, _TARS[form])
            else:
                yield path.name, _text(_unpacked(file, form), path, form, str(path))


def _unpacked(file: IO[bytes], form: str | None) -> IO[bytes]:
    """Return a stream of a file's content without its compression."""
    stream: IO[bytes] = file if form is None else _OPENERS[form](file)
    return stream


def is_hidden(name: str) -> bool:
    """Whether a file's path inside a folder or archive, or a folder of it, begins with a dot, or is
    of macOS' `__MACOSX`."""
    return any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in PurePath(name).parts)


def plain_bytes(path: Path) -> int | None:
    """Return the size of a file's text if it is not compressed, else None; errors as in
    `members`."""
    with _naming(path), path.open("rb") as file:
        return None if _PACKED.match(file.read(_HEAD_BYTES)) else path.stat().st_size


def names(path: AnyPath) -> list[str]:
    """Return the names of a file's members; errors as in `members`, and TxlError if there are more
    than MAX_FILES."""
    found = [name for name, _ in islice(members(path), MAX_FILES + 1)]
    if len(found) > MAX_FILES:
        raise TxlError(f"{path}: is an archive of more than {MAX_FILES:,} files; unpack it first")
    return found


def pieces(path: AnyPath) -> Iterator[bytes]:
    """Yield the text of a file or pipe in pieces; errors as in `members`, and TxlError for an
    archive of more files than one, or of none."""
    count = len(names(path)) if Path(path).is_file() else 1  # before any of it is taken for the text
    if count == 1:
        for count, (_, text) in enumerate(members(path), 1):
            if count > 1:
                break
            yield from text
    if count != 1:
        raise TxlError(f"{path}: is an archive of {'several' if count else 'no'} files; unpack it and pass one of them")


def read(path: AnyPath) -> bytes:
    """Read the text of a file or a pipe; errors as in `pieces`, and TxlError if the text is larger
    than LARGEST_BYTES (a decompression bomb)."""
    found, size = [], 0
    for piece in pieces(path):
        size += len(piece)
        if size > LARGEST_BYTES:
            raise TxlError(f"{path}: holds more than {LARGEST_BYTES / 1e9:g} GB of text, too much to read at once")
        found.append(piece)
    return b"".join(found)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, or what a pipe gives."""
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise TxlError(f"{path}: is a folder, a device or a socket; a file or a pipe is needed")
    with path.open("rb") as file:
        if stat.S_ISREG(kind):
            yield file
            return
        head = b""
        while len(head) < tarfile.BLOCKSIZE and (more := file.read1(tarfile.BLOCKSIZE - len(head))):
            head += more
        if not _PACKED.match(head):
            yield _Pipe(file, head)  # type: ignore[misc]
            return
        held = head + file.read(LARGEST_BYTES + 1)
    if len(held) > LARGEST_BYTES:
        raise TxlError(f"{path}: a pipe of more than {LARGEST_BYTES / 1e9:g} GB; write it to a file")
    yield io.BytesIO(held)


class _Pipe:
    """The text that a pipe gives, as it comes. Only `head`, its first bytes, can be read again."""

    def __init__(self, file: Any, head: bytes) -> None:
        self._file, self._head, self._at = file, head, 0

    def read(self, count: int) -> bytes:
        piece: bytes = self._head[self._at : self._at + count] or self._file.read1(count)
        self._at += len(piece)
        return piece

    def seek(self, at: int) -> None:
        self._at = at

    def tell(self) -> int:
        return self._at


@contextmanager
def _naming(path: Path, form: str | None = None) -> Iterator[None]:
    """Turn the errors of reading into a one-line TxlError that names the file."""
    try:
        yield
    except _DAMAGE as error:
        if form is None:
            raise TxlError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        raise TxlError(f"{path}: its {form} data is truncated or damaged: {error}") from error


def _is_tar(head: bytes) -> bool:
    """Whether the checksum of the first tar header is right; the oldest tar format has no magic
    bytes."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def plain_text(piece: bytes, what: str, at: int = 0) -> bytes:
    """Return a piece of a text that begins at byte `at`, without UTF-8's byte-order mark.

    what: the text's name in messages.

    Raises:
        TxlError: it has the mark of UTF-16 or UTF-32, or a zero byte, which no text has.
    """
    zero, marked = piece.find(b"\0"), not at and piece.startswith(_MARKS)
    if zero >= 0 or marked:
        why = "the byte-order mark of UTF-16 or UTF-32" if marked else f"a zero byte at {at + zero:,}"
        raise TxlError(f"{what}: is no text in UTF-8 ({why}); if it is UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    return piece if at else piece.removeprefix(codecs.BOM_UTF8)


def _text(stream: IO[bytes], path: Path, form: str | None, what: str) -> Iterator[bytes]:
    """Yield a text piece by piece; what: its name in messages.

    Raises:
        TxlError: it is truncated or damaged, or not text.
    """
    with _naming(path, form):
        at, piece = 0, stream.read(max(PIECE_BYTES, _HEAD_BYTES))
        if _PACKED.match(piece) or _is_tar(piece):
            raise TxlError(f"{what}: is compressed data or an archive, not text; unpack it first")
        while piece:
            yield plain_text(piece, what, at)
            at += len(piece)
            piece = stream.read(PIECE_BYTES)


def _zip_members(file: IO[bytes], path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and not is_hidden(entry.filename):
                with archive.open(entry) as stream:
                    yield entry.filename, _text(stream, path, "zip", f"{path}: {entry.filename}")


class _Bounded:
    """A stream from which at most `left` more bytes are read; None for no limit."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.left: int | None = _HEADER_BYTES

    def read(self, count: int) -> bytes:
        piece = self.stream.read(count)
        if self.left is not None:
            self.left -= len(piece)
            if self.left < 0:
                raise tarfile.ReadError(f"a header of more than {_HEADER_BYTES:,} bytes")
        return piece


class _Header(tarfile.TarInfo):
    """A tar header that raises when it is damaged, where tarfile would take it for the archive's
    end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the zero block that ends an archive
                raise
            raise tarfile.ReadError(f"header: {error}") from error


def _tar_members(stream: IO[bytes], path: Path, form: str) -> Iterator[Member]:
    bounded: Any = _Bounded(stream)
    with _naming(path, form), tarfile.open(fileobj=bounded, mode="r|", tarinfo=_Header) as archive:
        while (member := archive.next()) is not None:
            if member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is a sparse file")
            packed = archive.extractfile(member) if member.isfile() else None
            if packed is not None:
                bounded.left = None
                if not is_hidden(member.name):
                    yield member.name, _text(packed, path, form, f"{path}: {member.name}")
                while packed.read(PIECE_BYTES):  # reads the member to its end, so that a header comes next
                    pass
            archive.members = []  # type: ignore[attr-defined]  # this list would grow with the archive
            bounded.left = _HEADER_BYTES
        while stream.read(PIECE_BYTES):  # reads to the end, so that the compression's checksum is verified
            pass
