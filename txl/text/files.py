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
from typing import Any

from txl.errors import TxlError
from txl.paths import AnyPath

LARGEST_BYTES = 2_000_000_000  # maximum size of a text, or of a zip archive from a pipe, that is held in memory at once
PIECE_BYTES = 1 << 20
MAX_FILES = 100_000  # in an archive
_HEADER_BYTES = 1 << 16  # maximum size of a tar member's header: its name and attributes
_OPENERS: dict[str | None, Any] = {"bzip2": bz2.open, "gzip": gzip.open, "xz": lzma.open}
_FORMATS = re.compile(  # other: zstd, 7z, compress, lz4, lzip, lzma and rar, which are not read
    rb"(?P<bzip2>BZh[1-9](?:1AY&SY|\x17rE8P\x90))|(?P<gzip>\x1f\x8b\x08)|(?P<xz>\xfd7zXZ\0)"
    rb"|(?P<zip>PK(?:\x03\x04|\x05\x06|\x07\x08))|(?P<other>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18|7z\xbc\xaf\x27\x1c"
    rb"|\x1f\x9d|\x04\x22\x4d\x18|LZIP\x01|\]\0\0..\xff{8}|Rar!\x1a\x07)",
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
            damaged or encrypted; or a pipe gives a zip archive of more than LARGEST_BYTES.
    """
    path = Path(path)
    with _naming(path):
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            raise TxlError(f"{path}: is a folder, a device or a socket; a file or a pipe is needed")
        with path.open("rb") as file:
            found = _FORMATS.match(file.peek())
            if found and found.lastgroup == "zip":
                yield from _zip_members(file, path)
                return
            opener = _OPENERS.get(found and found.lastgroup)
            stream = opener(file) if opener else file
            if _is_tar(stream.peek(tarfile.BLOCKSIZE)):
                yield from _tar_members(stream, path)
            else:
                yield path.name, _text(stream, path, str(path))


def is_hidden(name: str) -> bool:
    """Whether a file's path inside a folder or archive, or a folder of it, begins with a dot, or is
    of macOS' `__MACOSX`."""
    return any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in PurePath(name).parts)


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
def _naming(path: Path) -> Iterator[None]:
    """Turn the errors of reading into a one-line TxlError that names the file."""
    try:
        yield
    except _DAMAGE as error:
        reason = error.strerror if isinstance(error, OSError) and error.errno else None
        what = f"cannot be read: {reason}" if reason else f"is truncated or damaged: {error}"
        raise TxlError(f"{path}: {what}") from error


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


def _text(stream: Any, path: Path, what: str) -> Iterator[bytes]:
    """Yield a text piece by piece; what: its name in messages. Errors as in `members`."""
    with _naming(path):
        head = stream.peek(tarfile.BLOCKSIZE)
        if _FORMATS.match(head) or _is_tar(head):
            raise TxlError(f"{what}: is compressed data or an archive, not text; unpack it first")
        at, piece = 0, stream.read(max(map(len, _MARKS)))  # a whole mark, also from a pipe
        while piece:
            yield plain_text(piece, what, at)
            at += len(piece)
            piece = stream.read1(PIECE_BYTES)


def _zip_members(file: Any, path: Path) -> Iterator[Member]:
    if not file.seekable():  # a pipe
        file = io.BytesIO(file.read(LARGEST_BYTES + 1))
        if len(file.getbuffer()) > LARGEST_BYTES:
            raise TxlError(f"{path}: a pipe of more than {LARGEST_BYTES / 1e9:g} GB; write it to a file")
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and not is_hidden(entry.filename):
                with archive.open(entry) as stream:
                    yield entry.filename, _text(stream, path, f"{path}: {entry.filename}")


class _Header(tarfile.TarInfo):
    """A tar header that raises when it is damaged, where tarfile would take it for the archive's
    end, and when it would take more memory than a name and its attributes need."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(tarfile.BLOCKSIZE):  # which ends an archive
                raise
            raise tarfile.ReadError(f"header: {error}") from error
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{header.name!r} is a sparse file")
        if header.size > _HEADER_BYTES and not header.isreg():
            raise tarfile.ReadError(f"a header of more than {_HEADER_BYTES:,} bytes")
        return header

    def _proc_gnusparse_10(self, header: tarfile.TarInfo, *_: object) -> None:  # reads a map of any length
        raise tarfile.ReadError(f"{header.name!r} is a sparse file")


def _tar_members(stream: Any, path: Path) -> Iterator[Member]:
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
        while (member := archive.next()) is not None:
            if member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is a sparse file")
            packed = archive.extractfile(member) if member.isfile() and not is_hidden(member.name) else None
            if packed is not None:
                yield member.name, _text(packed, path, f"{path}: {member.name}")
            archive.members = []  # type: ignore[attr-defined]  # this list would grow with the archive
        while stream.read(PIECE_BYTES):  # to the end, so that the compression's checksum is verified
            pass
