"""What becomes of errors that nobody foresaw: one line, and a file with the rest."""

import errno
import os
import sys
import tempfile
import traceback

from txl.errors import TxlError


def report(error: BaseException) -> None:
    """Names the error on stderr, and the file that its traceback was written to."""
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="txl-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the traceback is in {path}"
    except OSError:
        where = "its traceback could not be written"
    summary = " ".join(str(error).split())[:500]
    print(f"error: {type(error).__name__}: {summary or 'no more is known'} ({where})", file=sys.stderr)


def reason(error: BaseException) -> str | None:
    """What to say of an error that was foreseen; None for one that nobody did."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"standard output: {error.strerror}"  # errors of files name them
    return str(error) if isinstance(error, (TxlError, OSError)) else memory_summary(error)


def memory_summary(error: BaseException) -> str | None:
    """What to say where memory, the range of a number or a setting of the kernels is at fault; None
    for other errors."""
    text = str(error)
    if text.startswith("TXL_KERNELS_"):  # a setting in the environment that is none
        return text
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"there is not enough memory for these sizes ({' '.join(text.split())[:200] or 'MemoryError'})"
    if isinstance(error, OverflowError) or "Storage size calculation overflowed" in text:
        return f"a number is beyond what can be computed with ({' '.join(text.split())[:200]})"
    return None
