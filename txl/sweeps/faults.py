"""Why a row failed, in a line; what nobody foresaw has its traceback in the row's folder."""

import traceback
from pathlib import Path

from txl.commands.last_resort import memory_summary
from txl.errors import TxlError


def reason(error: Exception, folder: Path) -> str:
    """A line on an error; folder: the row's."""
    if isinstance(error, (TxlError, OSError)):
        return str(error)
    known = memory_summary(error)
    if known is not None:
        return known
    path = folder / "error.txt"
    folder.mkdir(exist_ok=True)
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]} (the traceback is in {path})"
