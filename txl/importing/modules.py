"""Modules pickled whole in torch.save's older format, which torch reads as code or not at all.

torch's reader of the format, with an unpickler that knows tensors, plain containers and the names
it is told; each name becomes an inert stand-in.
"""

import pickle
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch

from txl.importing.inert import CONTAINERS, Inert, Unpickler

_WIDEST = 16  # bytes of an element


class _Function:
    """Calls a function, and is nothing that a pickle could change."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"sets {name} of a function")

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
    "torch.nn.parameter.Parameter": torch.nn.Parameter,
    "torch.Size": torch.Size,
    "__builtin__.set": set,
    "builtins.set": set,
}


class _Modules(Unpickler):
    """Attributes: names: of classes that become inert. most: bytes of the file."""

    names: ClassVar[frozenset[str]] = frozenset()
    most: ClassVar[int] = 0

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _TENSORS:
            return _Function(_TENSORS[full])
        if (module, name) in CONTAINERS:
            return super().find_class(module, name)
        if full in self.names:
            return type("Inert", (Inert,), {"kind": full, "dump_patches": False})
        raise pickle.UnpicklingError(f"Unsupported class {full}")

    def _persistent(self) -> None:
        """A class with its source, which is not looked at, or a storage that the file can hold."""
        given = self.stack.pop()  # type: ignore[attr-defined]
        if not isinstance(given, tuple) or len(given) < 5 - (given[:1] == ("module",)):
            raise pickle.UnpicklingError("a persistent id of no known form")
        if given[0] == "module":
            self.append(given[1])  # type: ignore[attr-defined]
            return
        if given[0] != "storage" or not isinstance(given[4], int) or not 0 <= given[4] <= self.most:
            raise pickle.UnpicklingError(f"a storage of {given[4]} elements")
        self.append(self.persistent_load(given))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = Unpickler.dispatch | {pickle.BINPERSID[0]: _persistent}


def load(path: Path, classes: Iterable[str]) -> Any:
    """What the file holds; raises anything where it is damaged or holds other names."""
    kind = type("Unpickler", (_Modules,), {"names": frozenset(classes), "most": path.stat().st_size})
    reader = types.ModuleType("inert")
    reader.Unpickler = kind  # type: ignore[attr-defined]
    reader.load = lambda file, **options: kind(file, **options).load()  # type: ignore[attr-defined]
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
