"""What public functions take for a path, a `Path` of it made at once; files replaced whole."""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from txl.errors import TxlError

AnyPath = str | os.PathLike[str]


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or leaves the one that is there as it was."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def replace_bytes(path: Path, content: bytes) -> None:
    """As `replace_text`, of bytes; several writers do not see each other's."""
    fresh = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with fresh.open("xb") as file:
            file.write(content)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def make_folder(path: Path, option: str) -> None:
    """Makes a folder if it is not there.

    Raises:
        TxlError: it cannot be one, or nothing can be written to it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TxlError(f"{option} must name a folder that can be written, got {path}: {error.strerror}") from error
