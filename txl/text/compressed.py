"""Files as text: compressed ones are decompressed, told by their first bytes, not their name."""

import bz2
import gzip
import importlib
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from txl.errors import TxlError
from txl.paths import AnyPath
from txl.text.pipes import read_all

# Of what is read at once: prompts, texts to score. Texts to prepare are read by `pieces.Stream`.
LARGEST_BYTES = 2_000_000_000
PIECE_BYTES = 1 << 20
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
READABLE = ("bzip2", "gzip", "xz", "zip", "zstd")


class Text(NamedTuple):
    """The bytes of a text, the name it was packed under, and the compression they were found in."""

    data: bytes
    name: str
    compression: str | None


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


def read(path: AnyPath) -> Text:
    """Reads a file, and decompresses it if it is bzip2, gzip, xz, zstd, or a zip of one file.

    Raises:
        TxlError: it cannot be read or decompressed, is truncated or damaged, is larger than
            LARGEST_BYTES without its compression, is an archive of several files or encrypted, or
            is compressed in another way or twice.
    """
    path = Path(path)
    data = read_all(path, LARGEST_BYTES)
    found = compression(data)
    if found is None:
        return Text(data, path.name, None)
    if found not in READABLE:
        raise TxlError(f"{path}: is {found} data, not text; unpack it first")
    with naming_damage(found, path):
        stream, name = decompressed(found, io.BytesIO(data), path)
        with stream:
            text = _bounded(stream, path)
    refuse_inside(compression(text), found, path)
    return Text(text, name, found)


@contextmanager
def naming_damage(found: str | None, path: Path) -> Iterator[None]:
    """Turns what decompressors raise into one line that names the file."""
    try:
        yield
    except _damage(found, path) as error:
        if found is None:
            raise TxlError(f"{path}: cannot be read: {error}") from error
        raise TxlError(f"{path}: its {found} data is truncated or damaged: {error}") from error


def refuse_inside(inside: str | None, found: str | None, path: Path) -> None:
    """Raises TxlError if there is compressed data, or an archive, within compressed data."""
    if inside is not None:
        raise TxlError(f"{path}: holds {inside} data within {found}, not text; unpack it first")


def decompressed(found: str, file: IO[bytes], path: Path) -> tuple[IO[bytes], str]:
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


def _bounded(stream: IO[bytes], path: Path) -> bytes:
    """All of a stream, read in pieces so that a decompression bomb is stopped at the limit."""
    pieces, size = [], 0
    while piece := stream.read(PIECE_BYTES):
        size += len(piece)
        if size > LARGEST_BYTES:
            raise TxlError(
                f"{path}: holds more than {LARGEST_BYTES / 1e9:g} GB without its compression; "
                "if it is meant to, decompress it and pass the plain file"
            )
        pieces.append(piece)
    return b"".join(pieces)


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
