"""What public functions take for a path, a `Path` of it made at once; files replaced whole."""

import os
from pathlib import Path

AnyPath = str | os.PathLike[str]


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or leaves the one that is there as it was."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes) -> None:
    """As `replace_text`, of bytes."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_bytes(content)
    os.replace(fresh, path)
