"""Errors that are the user's to mend: shown as one line, without a traceback."""


class TxlError(Exception):
    """What is wrong and what would be accepted, in one line."""
