"""What public functions take for a path, a `Path` of it made at once; files replaced whole."""

import os
from pathlib import Path

AnyPath = str | os.PathLike[str]


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or leaves the one that is there as it was."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
