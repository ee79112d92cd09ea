"""Text from plain, compressed and archived files (zip, .tar.gz) in memory that does not grow with
them. Formats are recognized by content, not by name."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from txl.errors import TxlError
from txl.paths import AnyPath

LARGEST_BYTES = 2_000_000_000  # maximum size of decompressed data or of a pipe's data that is held in memory at once
PIECE_BYTES = 1 << 20
_HEAD_BYTES = 8192
_HEADER_BYTES = 1 << 20  # maximum size of a .tar.gz member's header: its name and attributes
MAX_FILES = 100_000  # in an archive
_OPENERS: dict[str, Any] = {"bzip2": bz2.open, "gzip": gzip.open, "xz": lzma.open}
_MAGIC = {
    "bzip2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    "gzip": rb"\x1f\x8b\x08",
    "xz": rb"\xfd7zXZ\0",
    "zip": rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "7z": rb"7z\xbc\xaf\x27\x1c",
    "compress": rb"\x1f\x9d",
    "lz4": rb"\x04\x22\x4d\x18",
    "lzip": rb"LZIP\x01",
    "lzma": rb"\]\0\0..\xff{8}",
    "rar": rb"Rar!\x1a\x07",
}
_MARKS = {  # UTF-32's first, since UTF-16's is a prefix of it
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
_FORMATS = {name: re.compile(magic, re.DOTALL) for name, magic in _MAGIC.items()}
_DAMAGE = (
    EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, struct.error, ValueError,
    IndexError, RecursionError, NotImplementedError,
)  # fmt: skip

Watch = Callable[[int], None]
"""Takes how many more bytes of a file have been read."""
Member = tuple[str, Iterator[bytes]]  # the pieces must be read before the next member


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        form: bzip2, gzip, xz, zip or tar.gz; None for plain text.
        names: file names in an archive; None for a single text, also for one in a zip.
        name: the name under which the text was packed, else the file's.
        size: bytes of the decompressed text.
    """

    form: str | None
    names: list[str] | None
    name: str
    size: int


def look(path: AnyPath, watch: Watch = lambda count: None) -> Contents:
    """Find out what a file contains. It is read once, or, if it is plain text, only its beginning.

    Raises:
        TxlError: it cannot be read, or is not a regular file, not text, truncated, damaged or
            encrypted.
    """
    path = Path(path)
    with _regular(path) as file:
        form, progress = _form(file, path), _Progress(file, watch)
        if form in ("zip", "tar.gz"):
            names = _names(file, path, form, progress)
            if form == "tar.gz" or len(names) != 1:
                return Contents(form, names, path.name, 0)
        name, text = next(_members(file, path, form, progress))
        if form is not None:
            return Contents(form, None, PurePosixPath(name).name, sum(map(len, text)))
        next(text, b"")  # raises if it is not text
        file.seek(0)
        marked = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        return Contents(None, None, name, path.stat().st_size - len(codecs.BOM_UTF8) * marked)


def members(path: AnyPath, watch: Watch = lambda count: None) -> Iterator[Member]:
    """Yield names and contents of the files in an archive, in its order; a file that is no archive
    is its own only member. Errors as in `look`."""
    path = Path(path)
    with _regular(path) as file:
        yield from _members(file, path, _form(file, path), _Progress(file, watch))


def pieces(path: AnyPath, watch: Watch = lambda count: None) -> Iterator[bytes]:
    """Yield the text of a file in pieces; errors as in `look`, and TxlError for an archive of
    several files."""
    path = Path(path)
    with _regular(path) as file:
        yield from _only_text(file, path, _form(file, path), _Progress(file, watch))


def read(path: AnyPath) -> bytes:
    """Read the text of a file or a pipe; errors as in `stream`."""
    return b"".join(stream(path))


def stream(path: AnyPath) -> Iterator[bytes]:
    """Yield the text of a file or a pipe in pieces, reading as they are consumed.

    Raises:
        TxlError: as in `pieces`, except that pipes are accepted; or the decompressed text is larger
            than LARGEST_BYTES.
    """
    path = Path(path)
    with _naming(path):
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or stat.S_ISDIR(kind)):
            raise TxlError(f"{path}: is a device or a socket; a file or a pipe is needed")
        file: IO[bytes] = path.open("rb")
    with file:
        if stat.S_ISFIFO(kind):
            yield from _pipe_pieces(file, path)
        else:
            yield from _bounded_pieces(file, path)


def _bounded_pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the text of a file in pieces; raise TxlError if a compressed one exceeds LARGEST_BYTES
    (a decompression bomb)."""
    form, size = _form(file, path), 0
    for piece in _only_text(file, path, form, _Progress(file, lambda count: None)):
        size += len(piece)
        if form is not None and size > LARGEST_BYTES:
            raise TxlError(
                f"{path}: holds more than {LARGEST_BYTES / 1e9:g} GB without its compression; "
                "if it is meant to, decompress it and pass the plain file"
            )
        yield piece


def _pipe_pieces(file: Any, path: Path) -> Iterator[bytes]:
    """Yield what a pipe gives until its writer closes it; compressed data is first held in
    memory."""
    with _naming(path):
        head = b""
        while len(head) < tarfile.BLOCKSIZE and (more := file.read1(PIECE_BYTES)):
            head += more
    if _format(head) is not None:
        with _naming(path):
            held = head + file.read(LARGEST_BYTES + 1)
        _check_pipe(path, len(held))
        yield from _bounded_pieces(io.BytesIO(held), path)
        return
    size, piece = 0, without_mark(head, str(path))
    while piece:
        size += len(piece)
        _check_pipe(path, size)
        yield piece
        with _naming(path):
            piece = file.read1(PIECE_BYTES)


def _check_pipe(path: Path, size: int) -> None:
    if size > LARGEST_BYTES:
        raise TxlError(f"{path}: a pipe of more than {LARGEST_BYTES / 1e9:g} GB; write it to a file")


@contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    if path.exists() and not path.is_file():
        raise TxlError(f"{path}: is no regular file; it is read more than once, so write it to one first")
    with _naming(path):
        file = path.open("rb")
    with file:
        yield file


@contextmanager
def _naming(path: Path, form: str | None = None) -> Iterator[None]:
    """Turn the errors of reading into a one-line TxlError that names the file."""
    try:
        yield
    except _DAMAGE as error:
        if form is None:
            raise TxlError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        raise TxlError(f"{path}: its {form} data is truncated or damaged: {error}") from error


class _Progress:
    """Reports how many more bytes of a file have been read, also when the decompressor reads
    them."""

    def __init__(self, file: IO[bytes], watch: Watch) -> None:
        self._file, self._watch, self._seen = file, watch, 0

    def update(self) -> None:
        position = self._file.tell()
        self._watch(max(position - self._seen, 0))
        self._seen = max(position, self._seen)


def _format(head: bytes) -> str | None:
    """Return the compression or archive format that the first bytes show; None for anything
    else."""
    found = next((name for name, magic in _FORMATS.items() if magic.match(head)), None)
    return "tar" if found is None and _is_tar(head) else found


def _is_tar(head: bytes) -> bool:
    """Whether the checksum of the first tar header is right; the oldest tar format has no magic
    bytes."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _form(file: IO[bytes], path: Path) -> str | None:
    """Return the form of a file if it is one that is read here; None for anything else, which is
    read as text or rejected as such."""
    with _naming(path):
        found = _format(file.read(_HEAD_BYTES))
        file.seek(0)
    if found == "gzip":
        with _naming(path, found):
            if _is_tar(_OPENERS[found](file).read(tarfile.BLOCKSIZE)):
                found = "tar.gz"
            file.seek(0)
    return found if found in (*_OPENERS, "zip", "tar.gz") else None


def _members(file: IO[bytes], path: Path, form: str | None, progress: _Progress) -> Iterator[Member]:
    if form == "zip":
        yield from _zip_members(file, path, progress)
    elif form == "tar.gz":
        yield from _tar_members(file, path, progress)
    else:
        stream = file if form is None else _OPENERS[form](file)
        yield path.name, _text(stream, path, form, str(path), progress)


def _names(file: IO[bytes], path: Path, form: str, progress: _Progress) -> list[str]:
    """Return the names of the files in an archive; raise TxlError if there are more than
    MAX_FILES."""
    found = [name for name, _ in islice(_members(file, path, form, progress), MAX_FILES + 1)]
    if len(found) > MAX_FILES:
        raise TxlError(f"{path}: is an archive of more than {MAX_FILES:,} files; unpack it first")
    return found


def _only_text(file: IO[bytes], path: Path, form: str | None, progress: _Progress) -> Iterator[bytes]:
    if form == "tar.gz":
        raise TxlError(f"{path}: holds tar data within gzip, not text; unpack it first")
    if form == "zip":
        names = _names(file, path, form, progress)
        if len(names) != 1:
            raise TxlError(
                f"{path}: the zip archive holds {len(names)} files ({some(names)}) and not one; "
                "unpack it and pass the folder"
            )
    return next(_members(file, path, form, progress))[1]


def some(names: list[str]) -> str:
    """Join the first names for an error message."""
    return ", ".join(map(repr, names[:3])) + (", .." if len(names) > 3 else "")


def without_mark(head: bytes, what: str) -> bytes:
    """Strip UTF-8's byte-order mark from the first bytes of a text (at least 4 of them).

    what: the text's name in messages.

    Raises:
        TxlError: the text is UTF-16 or UTF-32: it has their mark, or its zero bytes, which UTF-8
            text does not contain, are all at even or all at odd positions, or are at least an
            eighth of all.
    """
    found = next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), None)
    if found is not None:
        how = f"iconv -f {found} -t UTF-8 FILE > NEW"
        raise TxlError(f"{what}: is {found} text; texts must be UTF-8 or plain bytes: {how}")
    zeros, even = head.count(0), head[::2].count(0)
    if zeros and (even in (0, zeros) or 8 * zeros >= len(head)):
        raise TxlError(
            f"{what}: is no text, or UTF-16 or UTF-32 without a byte-order mark (a zero byte at {head.index(0):,}); "
            "if it is text: iconv -f UTF-16LE -t UTF-8 FILE > NEW"
        )
    return head.removeprefix(codecs.BOM_UTF8)


def _text(stream: IO[bytes], path: Path, form: str | None, what: str, progress: _Progress) -> Iterator[bytes]:
    """Yield a text piece by piece; what: its name in messages.

    Raises:
        TxlError: it is truncated or damaged, or not text.
    """
    with _naming(path, form):
        head = stream.read(_HEAD_BYTES)
    found = _format(head)
    if found is not None:
        held = f"is {found} data" if form is None else f"holds {found} data within {form}"
        raise TxlError(f"{what}: {held}, not text; unpack it first")
    head = without_mark(head, what)
    for at in range(0, len(head), PIECE_BYTES):
        yield head[at : at + PIECE_BYTES]
    while True:
        with _naming(path, form):
            piece = stream.read(PIECE_BYTES)
        progress.update()
        if not piece:
            return
        yield piece


def _zip_members(file: IO[bytes], path: Path, progress: _Progress) -> Iterator[Member]:
    with _naming(path, "zip"):
        archive = zipfile.ZipFile(file)
    for entry in archive.infolist():
        if entry.flag_bits & 1:
            raise TxlError(f"{path}: the zip archive is encrypted; unpack it first")
        if not entry.filename:
            raise TxlError(f"{path}: the zip archive holds a file without a name; unpack it first")
        if not entry.is_dir():
            yield entry.filename, _zip_pieces(archive, entry, path, progress)


def _zip_pieces(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, progress: _Progress) -> Iterator[bytes]:
    with _naming(path, "zip"):
        stream = archive.open(entry)
    with stream:
        yield from _text(stream, path, "zip", f"{path}: {entry.filename}", progress)


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


def _tar_members(file: IO[bytes], path: Path, progress: _Progress) -> Iterator[Member]:
    entries = _tar_entries(_OPENERS["gzip"](file))
    while True:
        with _naming(path, "tar.gz"):
            entry = next(entries, None)
        progress.update()
        if entry is None:
            return
        name, packed = entry
        yield name, _text(packed, path, "tar.gz", f"{path}: {name}", progress)


def _tar_entries(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield names and contents of an archive's files; errors are tarfile's."""
    bounded: Any = _Bounded(stream)
    with tarfile.open(fileobj=bounded, mode="r|", tarinfo=_Header) as archive:
        while (member := archive.next()) is not None:
            if member.issparse():
                raise tarfile.ReadError(f"{member.name!r} is a sparse file")
            packed = archive.extractfile(member) if member.isfile() else None
            if packed is not None:
                bounded.left = None
                yield member.name, packed
                while packed.read(PIECE_BYTES):  # reads the member to its end, so that a header comes next
                    pass
            archive.members = []  # type: ignore[attr-defined]  # this list would grow with the archive
            bounded.left = _HEADER_BYTES
    while stream.read(PIECE_BYTES):  # reads to the end, so that the compression's checksum is verified
        pass
