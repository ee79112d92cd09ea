"""Pickles read without executing anything: data comes out, of everything else an inert stand-in.

Python's own unpickler, the one written in Python, with changes: a name is never imported but
becomes `Inert`, or is one of a few containers; nothing outside the file is asked for (no persistent
ids, extensions, buffers); nothing is allocated or copied beyond what the file holds; keys of
dictionaries and members of sets are plain, since hashing what is nested has no bounds.
"""

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, ClassVar

from txl.errors import TxlError

CONTAINERS: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}
_REFUSED = (
    pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)  # fmt: skip
_WIDEST_KEY = 2**61 - 1  # beyond it integers that differ may have one hash


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


def check_keys(keys: Iterable[Any]) -> None:
    """Raises UnpicklingError: a key whose hash has no bounds."""
    for key in keys:
        plain = key is None or type(key) in (str, bytes, bool, float) or (type(key) is int and abs(key) < _WIDEST_KEY)
        if not plain and not isinstance(key, Inert):
            raise pickle.UnpicklingError(f"a key that is {type(key).__name__}")


class Unpickler(pickle._Unpickler):
    """Of pickles of data."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED
    }

    def __init__(self, file: Any, budget: int, **options: Any) -> None:
        """budget: elements that may be copied from container to container."""
        super().__init__(file, **options)
        self.budget = budget
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Never a class that anyone else has: a pickle can set attributes of classes."""
        if (module, name) not in self._classes:
            self._classes[module, name] = self.stand_in(module, name)
        return self._classes[module, name]

    def stand_in(self, module: str, name: str) -> Any:
        """What takes the place of a name."""
        container = CONTAINERS.get((module, name))
        if container is not None:
            return self._counted(name, container)
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})

    def _counted(self, name: str, container: type) -> type:
        """The container, of plain keys, filled with no more than the budget."""

        def init(it: Any, *args: Any) -> None:
            for given in args:
                self.budget -= len(given)
                if self.budget < 0:
                    raise pickle.UnpicklingError("copies of copies")
                check_keys(given if isinstance(given, dict) or container is Counter else (pair[0] for pair in given))
            container.__init__(it, *args)  # type: ignore[misc]

        return type(name, (container,), {"__init__": init})

    def _setitem(self) -> None:
        check_keys(self.stack[-2:-1])  # type: ignore[attr-defined]
        self.load_setitem()  # type: ignore[attr-defined]

    def _setitems(self) -> None:
        check_keys(self.stack[::2])  # type: ignore[attr-defined]
        self.load_setitems()  # type: ignore[attr-defined]

    def _dict(self) -> None:
        check_keys(self.stack[::2])  # type: ignore[attr-defined]
        self.load_dict()  # type: ignore[attr-defined]

    def _additems(self) -> None:
        check_keys(self.stack)  # type: ignore[attr-defined]
        self.load_additems()  # type: ignore[attr-defined]

    def _frozenset(self) -> None:
        check_keys(self.stack)  # type: ignore[attr-defined]
        self.load_frozenset()  # type: ignore[attr-defined]

    dispatch |= {
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.DICT[0]: _dict,
        pickle.ADDITEMS[0]: _additems,
        pickle.FROZENSET[0]: _frozenset,
    }


def unpickle(data: bytes, what: str) -> Any:
    """The object in a pickle.

    Raises:
        TxlError: it is damaged, truncated, or does what no data needs; begins with `what`.
    """
    try:
        # Strings of Python 2 are bytes, and stay so.
        return Unpickler(io.BytesIO(data), len(data), encoding="bytes").load()
    except RecursionError as error:
        raise TxlError(f"{what}: no pickle of data: nested too deeply") from error
    except Exception as error:  # what a damaged pickle raises is anything
        raise TxlError(f"{what}: not a whole pickle of data ({type(error).__name__}: {error})") from error
