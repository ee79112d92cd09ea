"""Files and folders on disk: paths as public functions take them, files replaced whole, locks, and
reads that cannot wait for ever."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from txl.errors import TxlError

AnyPath = str | os.PathLike[str]

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]+\.tmp", re.DOTALL)
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` when the block ends, and is removed if it
    raises: a temporary file beside it, fsync, rename.

    Raises:
        OSError: it cannot be written; names `path`, and leaves what is there as it was.
    """
    with naming(path):
        temporary, descriptor = _temporary(path, folder=False)
        with _removed_on_error(temporary), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, path)
        sync(path.parent)


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file as `replaced` does."""
    with replaced(path) as file:
        file.write(content)


def replace_text(path: Path, text: str) -> None:
    """Write a file as `replaced` does, in UTF-8."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder beside `path` that is renamed to it when the block ends, and removed if it
    raises. An empty folder at `path` is replaced.

    Raises:
        OSError: it cannot be written, or `path` is a file or holds something; names `path`.
    """
    with naming(path):
        temporary, descriptor = _temporary(path, folder=True)
        try:
            with _removed_on_error(temporary):
                yield temporary
                os.replace(temporary, path)
            sync(path.parent)
        finally:
            os.close(descriptor)


def _temporary(path: Path, *, folder: bool) -> tuple[Path, int]:
    """A new file or folder beside `path` and its descriptor, which is locked as long as its writer
    lives: see `remove_leftovers`."""
    while True:
        name = os.fsdecode(os.fsencode(path.name)[:200])
        temporary = path.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
        if folder:
            temporary.mkdir()
            descriptor = os.open(temporary, _DIRECTORY | os.O_NOFOLLOW)
        else:
            descriptor = create(temporary)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if temporary.exists():  # it could have been taken for a leftover before it was locked
            return temporary, descriptor
        os.close(descriptor)


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(path)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_leftovers(folder: Path, ending: str = "") -> None:
    """Remove the temporary files and folders that killed writers left in a folder.

    ending: of the names that they were to get.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _TEMPORARY.fullmatch(path.name)
        if match and match[1].endswith(ending) and not _has_writer(path):
            _remove(path)


def _has_writer(path: Path) -> bool:
    """Whether a process holds the lock of a temporary file, or may hold it."""
    if path.is_symlink():
        return False  # no writer of ours makes one
    try:
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NONBLOCK | _SAFE)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def create(path: Path) -> int:
    """Make a file that is not there, and return its descriptor; follows no symbolic link.

    Raises:
        FileExistsError: something has this name.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def append_text(path: Path, text: str) -> None:
    """Add to the end of a regular file, which is made if it is not there.

    Raises:
        OSError: it cannot be written, or `path` is a symbolic link, a pipe or a device.
    """
    with naming(path):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | _SAFE
        with os.fdopen(_regular(os.open(path, flags, 0o666)), "ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))


def read_bytes(path: Path) -> bytes:
    """Read a regular file; errors as `open_regular`."""
    with naming(path), open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8; errors as `open_regular`, and ValueError for other text."""
    return read_bytes(path).decode("utf-8")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it.

    Raises:
        OSError: it cannot be opened, or is a pipe, which could wait for ever, a device or a folder.
    """
    with naming(path):
        return os.fdopen(_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)), "rb")


def _regular(descriptor: int) -> int:
    """The descriptor, if it is a regular file's; else closes it and raises OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file")
    return descriptor


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise each OSError of the block under the name of `path`, as `write` and `fsync` do not."""
    try:
        yield
    except OSError as error:
        link = error.errno == errno.ELOOP and path.is_symlink()
        if error.errno is None or (error.filename == str(path) and not link):
            raise
        raise OSError(error.errno, "Is a symbolic link" if link else error.strerror, str(path)) from error


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(path: Path) -> int | None:
    """Lock a file, made if it is not there, until its descriptor is closed or the process ends.

    Returns: the descriptor; None if another holds it.

    Raises:
        OSError: it cannot be made, or `path` is a symbolic link, a pipe or a device.
    """
    with naming(path):
        descriptor = _regular(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _SAFE, 0o644))
    return _locked(descriptor, fcntl.LOCK_EX)


def lock_folder(folder: Path, *, shared: bool = False) -> int | None:
    """Lock a folder as `lock_file` does a file, and leave no file there.

    shared: a shared lock, as readers take it; else an exclusive one.
    """
    descriptor = os.open(folder, _DIRECTORY)
    return _locked(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def _locked(descriptor: int, kind: int) -> int | None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # not every file system has locks
        pass
    return descriptor


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder for the block.

    Raises:
        TxlError: another process holds it.
    """
    descriptor = lock_folder(folder)
    if descriptor is None:
        raise TxlError(f"{folder}: another process is writing there")
    try:
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path, option: str) -> None:
    """Make a folder if it is not there.

    Raises:
        TxlError: it cannot be one, or nothing can be written to it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TxlError(f"{option} must name a folder that can be written, got {path}: {error.strerror}") from error


@contextmanager
def results_folder(path: Path, option: str) -> Iterator[None]:
    """Make a folder for results and lock it for the block; what a killed writer left there goes.

    Raises:
        TxlError: as `make_folder`, or another process writes there.
    """
    make_folder(path, option)
    with held(path):
        remove_leftovers(path)
        yield
