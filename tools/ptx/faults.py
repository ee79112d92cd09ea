"""Exceptions of the PTX executor."""


class Fault(Exception):
    """The program is wrong on some schedule."""


class NotModelled(Exception):
    """The program uses an instruction or option that the executor does not implement."""
