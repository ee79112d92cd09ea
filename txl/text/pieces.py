"""Files read in pieces, decompressed on the way, in memory that does not grow with them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from txl.errors import TxlError
from txl.paths import AnyPath
from txl.text.compressed import PIECE_BYTES, READABLE, compression, decompressed, naming_damage, refuse_inside

_HEAD_BYTES = 512

Watch = Callable[[int], None]
"""Takes how many more bytes of a file have been read."""


class Stream:
    """A file read in pieces, decompressed on the way, in memory that does not grow with it.

    Attributes:
        compression: as `compression` finds it. A tar archive is read as it is.
        inside: what the decompressed data is itself, as `compression` finds it.
        name: the name the text was packed under, else the file's.
    """

    def __init__(self, path: AnyPath, watch: Watch = lambda count: None) -> None:
        """Opens it.

        Raises:
            TxlError: as `read` without its limit; or it is no regular file, which can be read but
                once.
        """
        self.path, self._watch, self._seen = Path(path), watch, 0
        if self.path.exists() and not self.path.is_file():
            raise TxlError(f"{path}: is no regular file; it is read more than once, so write it to one first")
        try:
            self._raw = self.path.open("rb")
            head = self._raw.read(_HEAD_BYTES)
            self._raw.seek(0)
        except OSError as error:
            raise TxlError(f"{path}: cannot be read: {error.strerror}") from error
        self._stream: IO[bytes] = self._raw
        self.name, self.compression, self.inside, self._head = self.path.name, compression(head), None, b""
        try:
            if self.compression is None or self.compression == "tar":
                self.inside = self.compression
            elif self.compression not in READABLE:
                raise TxlError(f"{path}: is {self.compression} data, not text; unpack it first")
            else:
                with naming_damage(self.compression, self.path):
                    self._stream, self.name = decompressed(self.compression, self._raw, self.path)
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
        with naming_damage(self.compression, self.path):
            data = self._stream.read(count)
        position = self._raw.tell()
        self._watch(max(position - self._seen, 0))
        self._seen = max(position, self._seen)
        return data

    def pieces(self) -> Iterator[bytes]:
        """The rest of the text; TxlError if it is compressed twice or is an archive."""
        if self.inside == "tar" and self.compression == "tar":
            raise TxlError(f"{self.path}: is tar data, not text; unpack it first")
        refuse_inside(self.inside, self.compression, self.path)
        while piece := self.read(PIECE_BYTES):
            yield piece
