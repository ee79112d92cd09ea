"""One training a folder at a time; the system releases the lock when a process ends, however."""

import fcntl
import os
from pathlib import Path

from txl.errors import TxlError

_NAME = ".lock"
_held: dict[str, int] = {}  # folder: descriptor, never closed: closing any would release the lock


def lock(folder: Path) -> None:
    """Takes a run's folder for this process; again does nothing.

    Raises:
        TxlError: another process trains there.
    """
    key = str(folder.resolve())
    if key in _held:
        try:
            if os.fstat(_held[key]).st_ino == (folder / _NAME).stat().st_ino:
                return
        except FileNotFoundError:  # the folder was removed and made anew
            pass
    descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise TxlError(f"{folder}: another process{f' ({who})' if who else ''} is training there") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _held[key] = descriptor


def unlock(folder: Path) -> None:
    """Gives a folder back; one that was not taken is left alone."""
    descriptor = _held.pop(str(folder.resolve()), None)
    if descriptor is not None:
        os.close(descriptor)
