"""The compiled modules of this package, and why one is not there."""

import importlib
from importlib import resources
from typing import Any


def load(name: str) -> tuple[Any, ImportError | None]:
    """(the module, None), or (None, why it cannot be imported)."""
    try:
        return importlib.import_module(f"txl_kernels.{name}"), None
    except ImportError as error:
        return None, error


def why_missing(name: str, what: str, error: ImportError | None) -> str:
    """What the build noted, or else what the import said."""
    note = resources.files("txl_kernels").joinpath(f"{name}_missing.txt")
    if note.is_file():
        return note.read_text(encoding="utf-8").strip()
    return f"the {what} module could not be loaded: {error}"
