"""Archives walked member by member, as streams: nothing is extracted to disk."""

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from txl.errors import TxlError
from txl.paths import AnyPath
from txl.text.compressed import PIECE_BYTES, compression, naming_damage
from txl.text.pieces import Stream, Watch

_TAR_DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError)
Member = tuple[str, Iterator[bytes]]  # the pieces are read before the next member is asked for


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
    with naming_damage("zip", path), zipfile.ZipFile(path) as archive:
        found = [member.filename for member in archive.infolist() if not member.is_dir()]
    return None if len(found) == 1 else found


def _is_zip(path: Path) -> bool:
    if path.exists() and not path.is_file():
        return False  # a pipe keeps its first bytes
    try:
        with path.open("rb") as file:
            return compression(file.read(512)) == "zip"
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error


def _zip_members(path: Path, watch: Watch) -> Iterator[Member]:
    with naming_damage("zip", path):
        raw = path.open("rb")
    with raw:
        with naming_damage("zip", path):
            archive = zipfile.ZipFile(raw)
        for member in archive.infolist():
            if member.flag_bits & 1:
                raise TxlError(f"{path}: the zip archive is encrypted; unpack it first")
            if not member.is_dir():
                yield member.filename, _zip_pieces(path, archive, member, watch)


def _zip_pieces(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, watch: Watch) -> Iterator[bytes]:
    with naming_damage("zip", path):
        file = archive.open(member)
    with file:
        seen = 0
        while True:
            with naming_damage("zip", path):
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
