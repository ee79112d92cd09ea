"""Pickles read without executing anything: data comes out, of everything else an inert stand-in.

Python's own unpickler, the one written in Python, with three changes: a name is never imported but
becomes `Inert`, or is one of a few containers; nothing outside the file is asked for (no persistent
ids, extensions, buffers); nothing is allocated for a size that the file does not hold.
"""

import io
import pickle
from collections import Counter, OrderedDict
from typing import Any, ClassVar

from txl.errors import TxlError

CONTAINERS = {("collections", "OrderedDict"): OrderedDict, ("collections", "Counter"): Counter}
_REFUSED = (
    pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)  # fmt: skip


class Inert:
    """Stands for an object or function of a pickle. Takes what a pickle does to it, and keeps its
    state.

    Attributes:
        kind: full name of what it stands for.
        state: what the pickle would have set; None if nothing.
    """

    kind = ""
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        """Of what is like a list: nothing that anyone looks at."""

    def extend(self, values: Any) -> None:
        """As `append`."""

    def add(self, value: Any) -> None:
        """As `append`."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As `append`."""


class Unpickler(pickle._Unpickler):
    """Of pickles of data."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        """Never a class that anyone else has: a pickle can set attributes of classes."""
        container = CONTAINERS.get((module, name))
        if container is not None:
            return type(name, (container,), {})
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})


def unpickle(data: bytes, what: str) -> Any:
    """The object in a pickle.

    Raises:
        TxlError: it is damaged, truncated, or does what no data needs; begins with `what`.
    """
    try:
        # Strings of Python 2 are bytes, and stay so.
        return Unpickler(io.BytesIO(data), encoding="bytes").load()
    except RecursionError as error:
        raise TxlError(f"{what}: no pickle of data: nested too deeply") from error
    except Exception as error:  # what a damaged pickle raises is anything
        raise TxlError(f"{what}: not a whole pickle of data ({type(error).__name__}: {error})") from error
