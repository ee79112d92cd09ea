"""What running PTX may find."""


class Fault(Exception):
    """The program does what it must not, on some schedule."""


class NotModelled(Exception):
    """The program does what this executor does not know."""
