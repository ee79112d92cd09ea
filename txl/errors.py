"""Errors that are the user's to mend, shown as one line without a traceback; the end of a training
that was asked to stop."""

# Dependencies that the kernels alone do without; `pip install --no-deps` leaves them out.
NEEDED = ("numpy", "rich", "safetensors", "typer")


class TxlError(Exception):
    """An error whose message says what is wrong and what would be accepted, in one line."""


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is written."""
