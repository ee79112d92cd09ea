"""Errors that the user can correct, shown as one line without a traceback, and the exception that
ends a training run on request."""


class TxlError(Exception):
    """An error whose message says what is wrong and what would be accepted, in one line."""


class Interrupted(Exception):
    """A training run was asked to stop; its checkpoint has been written."""
