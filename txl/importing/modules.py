"""torch.save's older format, also of modules pickled whole, which torch reads as code or not at
all.

Five pickles: a number, a version, sizes of integers, the object, and the keys of its storages; then
each storage, its length first. What the object may hold are tensors, plain containers and the names
that the reader is told, each of which becomes an inert stand-in.
"""

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from txl.importing.inert import CONTAINERS, Unpickler

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class _Fixed:
    """What a pickle gets in place of a function or a storage's type, and cannot change."""

    __slots__ = ("call", "dtype")
    call: Callable[..., Any] | None
    dtype: torch.dtype | None

    def __init__(self, call: Callable[..., Any] | None = None, dtype: torch.dtype | None = None) -> None:
        object.__setattr__(self, "call", call)
        object.__setattr__(self, "dtype", dtype)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"sets {name} of a function")

    def __call__(self, *args: Any) -> Any:
        if self.call is None:
            raise pickle.UnpicklingError("calls a storage's type")
        return self.call(*args)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, None)  # type: ignore[no-any-return]


def _parameter(data: torch.Tensor, *rest: Any) -> torch.Tensor:
    if type(data) is not torch.Tensor:
        raise pickle.UnpicklingError("a parameter of no tensor")
    return data


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
}


class _Modules(Unpickler):
    """Of the object. Attributes: names: of classes that become inert. storages: bytes by key, and
    what they are."""

    names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, file: Any, budget: int, **options: Any) -> None:
        super().__init__(file, budget, **options)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._left = budget

    def stand_in(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            return _Fixed(call=_FUNCTIONS[full])
        if module == "torch" and name in _DTYPES:
            return _Fixed(dtype=_DTYPES[name])
        if full in ("__builtin__.set", "builtins.set"):
            return _Fixed(call=lambda *args: None)
        if (module, name) in CONTAINERS or full in self.names:
            return super().stand_in(module, name)
        raise pickle.UnpicklingError(f"Unsupported class {full}")

    def _persistent(self) -> None:
        """A class, its source not looked at, or a storage that the file can hold."""
        given = self.stack.pop()  # type: ignore[attr-defined]
        if not isinstance(given, tuple) or len(given) < 5 - (given[:1] == ("module",)):
            raise pickle.UnpicklingError("a persistent id of no known form")
        if given[0] == "module":
            self.append(given[1])  # type: ignore[attr-defined]
        else:
            self.append(self._storage(*given[:6]))  # type: ignore[attr-defined]

    def _storage(self, what: Any, kind: Any, key: Any, place: Any, count: Any, view: Any = None) -> Any:
        dtype = kind.dtype if isinstance(kind, _Fixed) else None
        if what != "storage" or dtype is None or not isinstance(key, str) or view is not None:
            raise pickle.UnpicklingError("a persistent id of no known form")
        if type(count) is not int or not 0 <= count * dtype.itemsize <= self._left:
            raise pickle.UnpicklingError(f"a storage of {count} elements")
        if key not in self.storages:
            self._left -= count * dtype.itemsize
            self.storages[key] = torch.UntypedStorage(count * dtype.itemsize)
        if self.storages[key].nbytes() != count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} has two sizes")
        return torch.storage.TypedStorage(wrap_storage=self.storages[key], dtype=dtype, _internal=True)

    dispatch: ClassVar[dict[int, Any]] = Unpickler.dispatch | {pickle.BINPERSID[0]: _persistent}


def load(path: Path, classes: Iterable[str]) -> Any:
    """What the file holds; raises anything where it is damaged or holds other names."""
    size = path.stat().st_size
    kind: Any = type("Unpickler", (_Modules,), {"names": frozenset(classes)})
    with path.open("rb") as file:
        magic, version, sizes = (kind(file, size).load() for _ in range(3))
        if magic != _MAGIC or version != _VERSION or not sizes.get("little_endian"):
            raise pickle.UnpicklingError(f"version {version} is not {_VERSION}, or big-endian")
        reader = kind(file, size, encoding="utf-8")
        found = reader.load()
        keys = kind(file, size).load()
        if sorted(keys) != sorted(reader.storages):
            raise pickle.UnpicklingError("its storages are not those that it lists")
        for key in keys:
            _fill(reader.storages[key], file)
    return found


def _fill(storage: torch.UntypedStorage, file: BinaryIO) -> None:
    """From what follows: the number of elements, then their bytes."""
    count = int.from_bytes(file.read(8), "little")
    data = file.read(storage.nbytes())
    if len(data) != storage.nbytes() or (count == 0) != (len(data) == 0) or (count and len(data) % count):
        raise pickle.UnpicklingError("a storage is cut off, or of another size")
    if data:
        torch.tensor([], dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
