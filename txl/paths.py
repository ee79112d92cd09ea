"""Files and folders on disk: path arguments of public functions, atomic replacement, locks, and
reads that cannot block for ever."""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from txl.errors import TxlError

AnyPath = str | os.PathLike[str]

locks: dict[str, int] = {}  # locks of folders that this process holds: descriptors, by folder
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends and is removed if the block raises.
    It is `.NAME.txl.tmp` in the same folder, in place of a killed writer's; replacement is fsync
    and rename.

    Raises:
        OSError: it cannot be written, or another process writes it; the error names `path`, whose
            old content is kept.
    """
    with naming(path):
        temporary, descriptor = _temporary(path, folder=False)
        with _removed_on_error(temporary), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, path)


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content by bytes, atomically as `replaced` does."""
    with replaced(path) as file:
        file.write(content)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content by text in UTF-8, atomically as `replaced` does."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a new folder, `.NAME.txl.tmp`, that is renamed to `path` when the block ends and removed
    if the block raises. It replaces a killed writer's, and an empty folder at `path`.

    Raises:
        OSError: it cannot be written, another process writes it, or `path` is a file or a non-empty
            folder; the error names `path`.
    """
    if os.path.lexists(path) and (not path.name or path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "It exists already; choose another folder", str(path))
    with naming(path):
        temporary, descriptor = _temporary(path, folder=True)
        try:
            with _removed_on_error(temporary):
                yield temporary
                os.replace(temporary, path)
        finally:
            os.close(descriptor)


def _temporary(path: Path, *, folder: bool) -> tuple[Path, int]:
    """Make the temporary file or folder of `path`, in place of a killed writer's. Return it and its
    descriptor, which stays locked while this process writes."""
    temporary = path.with_name(f".{os.fsdecode(os.fsencode(path.name)[:200])}.txl.tmp")
    flags = _DIRECTORY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
    while True:
        if os.path.lexists(temporary):
            if _has_writer(temporary):
                raise OSError(errno.EEXIST, f"Another process writes to {temporary.name}", str(path))
            with suppress(FileNotFoundError):
                shutil.rmtree(temporary) if folder else temporary.unlink()
        try:
            if folder:
                temporary.mkdir()
            descriptor = os.open(temporary, flags | _SAFE, 0o666)
        except (FileExistsError, FileNotFoundError):
            if not path.parent.is_dir():
                raise
            continue  # another process came between
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):  # until it was locked, another process could have replaced it
            if os.path.samestat(os.fstat(descriptor), temporary.lstat()):
                return temporary, descriptor
        os.close(descriptor)


def _has_writer(path: Path) -> bool:
    """Whether a process holds the lock of a temporary file or folder. True for a symbolic link,
    which is not opened: no writer of this package makes one."""
    try:
        descriptor = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_NONBLOCK | _SAFE)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


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


def append_text(path: Path, text: str) -> None:
    """Append to a regular file, which is created if it does not exist.

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
    """Read a regular file of UTF-8; errors as `open_regular`, and ValueError for invalid UTF-8."""
    return read_bytes(path).decode("utf-8")


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is a device, a folder, or a pipe (reading one could block
            for ever).
    """
    with naming(path):
        return os.fdopen(_regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)), "rb")


def _regular(descriptor: int) -> int:
    """Return a descriptor if it is a regular file's; else close it and raise OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file")
    return descriptor


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path of a file that is valid UTF-8, for libraries that take no other: its own, or
    that of a descriptor, while the block runs.

    Raises:
        OSError: as `open_regular`.
    """
    if str(path).encode(errors="ignore").decode() == str(path):
        yield path
    else:
        with open_regular(path) as file:
            yield Path(f"/dev/fd/{file.fileno()}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise each OSError of the block again with the name of `path`, which `write` and `fsync`
    omit."""
    try:
        yield
    except OSError as error:
        link = error.errno == errno.ELOOP and path.is_symlink()
        if error.errno is None or (error.filename == str(path) and not link):
            raise
        raise OSError(error.errno, "Is a symbolic link" if link else error.strerror, str(path)) from error


def lock_file(path: Path) -> int | None:
    """Lock a file, which is created if it does not exist, until its descriptor is closed or the
    process ends.

    Returns: the descriptor, or None if another process holds the lock.

    Raises:
        OSError: it cannot be made, or `path` is a symbolic link, a pipe or a device.
    """
    with naming(path):
        descriptor = _regular(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _SAFE, 0o644))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # not every file system supports locks
        pass
    return descriptor


def lock_folder(folder: Path, what: str) -> None:
    """Lock a folder for this process; the operating system releases the lock when the process ends
    in any way. Does nothing if this process holds the lock already.

    Raises:
        TxlError: another process holds the lock; the message says that it does `what` there.
    """
    key, path = str(folder.resolve()), folder / ".lock"
    if key in locks:
        with suppress(OSError):
            if os.path.samestat(os.fstat(locks[key]), path.lstat()):
                return
        os.close(locks.pop(key))  # of a folder that was removed
    descriptor = lock_file(path)
    if descriptor is None:
        raise TxlError(f"{folder}: another process {what} there")
    locks[key] = descriptor


def make_folder(path: Path, option: str) -> None:
    """Create a folder if it does not exist.

    option: the name of the argument in the error.

    Raises:
        TxlError: it cannot be created or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        raise TxlError(f"{option} must name a folder that can be written, got {path}: {reason}") from error


def results_folder(path: Path, option: str) -> None:
    """Create a folder for results and lock it for this process. Errors as in `make_folder` and
    `lock_folder`."""
    make_folder(path, option)
    lock_folder(path, "writes its results")
