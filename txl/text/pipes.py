"""Files that are read once: regular ones, and pipes that somebody writes to."""

import os
import select
import stat
import time
from pathlib import Path

from txl.errors import TxlError

PATIENCE_S = 30.0  # for the first byte of a pipe


def read_all(path: Path, most: int) -> bytes:
    """The bytes of a regular file, or of a pipe up to `most`.

    Raises:
        TxlError: it cannot be read, is a device, a folder or a socket, or a pipe to which nobody
            writes for PATIENCE_S, or more than `most`.
    """
    try:
        kind = path.stat().st_mode
        if stat.S_ISFIFO(kind):
            return _read_pipe(path, most)
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise TxlError(f"{path}: is a device or a socket; a file or a pipe is needed")
        return path.read_bytes()
    except OSError as error:
        raise TxlError(f"{path}: cannot be read: {error.strerror}") from error


def _read_pipe(path: Path, most: int) -> bytes:
    """Opened without waiting: a named pipe without a writer would block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        pieces, size, began = [], 0, time.monotonic()
        while True:
            ready, _, _ = select.select([descriptor], [], [], 0.2)
            piece = os.read(descriptor, 1 << 20) if ready else None
            if piece:
                pieces.append(piece)
                size += len(piece)
                if size > most:
                    raise TxlError(f"{path}: a pipe of more than {most / 1e9:g} GB; write it to a file")
            elif piece is not None and pieces:  # the writer is done
                return b"".join(pieces)
            elif time.monotonic() - began > PATIENCE_S and not pieces:
                raise TxlError(f"{path}: is a pipe, and nobody wrote to it for {PATIENCE_S:g} seconds")
            elif piece is not None:
                time.sleep(0.05)  # no writer yet: select does not wait
    finally:
        os.close(descriptor)
