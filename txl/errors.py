"""Errors that the user can correct, shown as one line without a traceback, and the exception that
ends a training run on request."""

# Dependencies that txl needs and the kernels alone do not; `pip install --no-deps` omits them.
NEEDED = ("numpy", "rich", "safetensors", "typer")


class TxlError(Exception):
    """An error whose message says what is wrong and what would be accepted, in one line."""


class Interrupted(Exception):
    """A training run was asked to stop; its checkpoint has been written."""
