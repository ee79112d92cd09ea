"""Reading of pickles and torch.save files without executing anything: data and tensors are
returned, all other objects are replaced by inert ones."""

import io
import pickle
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl.errors import TxlError

_CONTAINERS: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
}
_REFUSED = (
    pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)  # fmt: skip
_WIDEST_KEY = 2**61 - 1  # larger integers can differ and have the same hash

_NUMBER, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's older format
_BEGINS = pickle.dumps(_NUMBER, 2)
_DTYPES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16,
    "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class Inert:
    """Inert replacement of an object or function of a pickle. It accepts all operations of a pickle
    and stores its state.

    Attributes:
        kind: full name of the replaced class or function.
        state: the state that the pickle would have set, or None.
    """

    kind = ""
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *values: Any) -> None:
        """Accept and ignore the items of a container-like object."""

    extend = add = __setitem__ = append


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for a key that could be slow to hash (nested or a very large
    integer)."""
    for key in keys:
        plain = key is None or type(key) in (str, bytes, bool, float) or (type(key) is int and abs(key) < _WIDEST_KEY)
        if not plain and not isinstance(key, Inert):
            raise pickle.UnpicklingError(f"a key that is {type(key).__name__}")


def _checked(load: str, keys: slice) -> Callable[[Any], None]:
    """Return an unpickler's opcode handler that first checks the keys it takes from the stack."""

    def step(it: Any) -> None:
        _check_keys(it.stack[keys])
        getattr(it, load)()

    return step


class Unpickler(pickle._Unpickler):
    """Unpickler for data, derived from Python's pure-Python unpickler.

    A name is never imported: it becomes `Inert` or one of a few containers. Nothing outside the
    file is accessed (no persistent ids, extensions or buffers). Nothing larger than the file is
    allocated or copied. Keys of dictionaries and members of sets must be plain, since hashing
    nested objects can take unlimited time.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED
    }

    def __init__(self, file: Any, budget: int, **options: Any) -> None:
        """budget: maximum number of elements copied from container to container."""
        super().__init__(file, **options)
        self.budget = budget
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class created for this unpickler, since a pickle can set attributes of
        classes."""
        if (module, name) not in self._classes:
            self._classes[module, name] = self._stand_in(module, name)
        return self._classes[module, name]

    def _stand_in(self, module: str, name: str) -> Any:
        """Make the class that replaces a name."""
        container = _CONTAINERS.get((module, name))
        if container is not None:
            return self._counted(name, container)
        return type("Inert", (Inert,), {"kind": f"{module}.{name}"})

    def _counted(self, name: str, container: type) -> type:
        """Make a subclass of a container that checks its keys and counts copied elements against
        the budget."""

        def init(it: Any, *args: Any) -> None:
            for given in args:
                self.budget -= len(given)
                if self.budget < 0:
                    raise pickle.UnpicklingError("copies of copies")
                _check_keys(given if isinstance(given, dict) or container is Counter else (pair[0] for pair in given))
            container.__init__(it, *args)  # type: ignore[misc]

        return type(name, (container,), {"__init__": init})

    dispatch |= {
        pickle.SETITEM[0]: _checked("load_setitem", slice(-2, -1)),
        pickle.SETITEMS[0]: _checked("load_setitems", slice(None, None, 2)),
        pickle.DICT[0]: _checked("load_dict", slice(None, None, 2)),
        pickle.ADDITEMS[0]: _checked("load_additems", slice(None)),
        pickle.FROZENSET[0]: _checked("load_frozenset", slice(None)),
    }


def unpickle(data: bytes) -> Any:
    """Return the object in a pickle.

    Raises:
        TxlError: it is damaged, truncated, or uses operations that data does not need.
    """
    try:
        # Strings of Python 2 may be UTF-8 or binary data.
        return Unpickler(io.BytesIO(data), len(data), encoding="utf-8", errors="surrogateescape").load()
    except RecursionError as error:
        raise TxlError("no pickle of data: nested too deeply") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise TxlError(f"not a whole pickle of data ({type(error).__name__}: {error})") from error


class _Fixed:
    """The immutable object that a pickle gets in place of a function or a storage type."""

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


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Tensor:
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, None)  # type: ignore[no-any-return]


def _parameter(data: Tensor, *rest: Any) -> Tensor:
    if type(data) is not Tensor:
        raise pickle.UnpicklingError("a parameter of no tensor")
    return data


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
}


class _Legacy(Unpickler):
    """Unpickler for torch.save's older format, including pickled modules, which torch itself only
    reads by importing their classes.

    Attributes:
        names: names of classes that become inert, as in `load`; apart from these only tensors and
            plain containers are read.
        storages: storages by key.
    """

    names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, file: Any, budget: int, **options: Any) -> None:
        super().__init__(file, budget, **options)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._left = budget

    def _stand_in(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _FUNCTIONS:
            return _Fixed(call=_FUNCTIONS[full])
        if module == "torch" and name in _DTYPES:
            return _Fixed(dtype=_DTYPES[name])
        if full in ("__builtin__.set", "builtins.set"):
            return _Fixed(call=lambda *args: None)
        if (module, name) in _CONTAINERS or full in self.names or name in self.names:
            return super()._stand_in(module, name)
        raise pickle.UnpicklingError(f"Unsupported class {full}")

    def _persistent(self) -> None:
        """Resolve a persistent id: a class (its source is ignored), or a storage no larger than the
        file."""
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


def _load_legacy(path: Path, classes: Iterable[str]) -> Any:
    """Read a file of the older format: five pickles (magic number, version, sizes of integers, the
    object, keys of its storages), then each storage, preceded by its length.

    Raises exceptions of any type if the file is damaged or has other names.
    """
    size = path.stat().st_size
    kind: Any = type("Unpickler", (_Legacy,), {"names": frozenset(classes)})
    with path.open("rb") as file:
        number, version, sizes = (kind(file, size).load() for _ in range(3))
        if number != _NUMBER or version != _VERSION or not sizes.get("little_endian"):
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
    """Fill a storage from a file: number of elements (8 bytes), then their bytes."""
    count = int.from_bytes(file.read(8), "little")
    data = file.read(storage.nbytes())
    if len(data) != storage.nbytes() or (count == 0) != (len(data) == 0) or (count and len(data) % count):
        raise pickle.UnpicklingError("a storage is cut off, or of another size")
    if data:
        elements = torch.tensor([], dtype=torch.uint8, device="cpu").set_(storage)
        elements.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def is_one(path: Path) -> bool:
    """Whether a file looks like one written by torch.save."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS or zipfile.is_zipfile(path)


def load(path: Path, classes: Iterable[str] = ()) -> Any:
    """Return the object in a torch.save file, on the CPU.

    Args:
        classes: names of classes that may occur besides tensors and data, with their module, or
            without it for any module; their objects become `Inert`, and no code of theirs runs.

    Raises:
        TxlError: the file is damaged, holds other objects, or claims more data than it has.
    """
    classes = tuple(classes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a class's source, which is ignored
            if not zipfile.is_zipfile(path):
                return _load_legacy(path, classes)
            named = [
                f"{module}.{name}" for module, name in _look_through(path) if {name, f"{module}.{name}"} & {*classes}
            ]
            inert = [(type("Inert", (Inert,), {"kind": name, "dump_patches": False}), name) for name in named]
            with torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
                return torch.load(path, map_location="cpu", weights_only=True)
    except TxlError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise TxlError(f"not a whole file of tensors and data ({_reason(error)})") from error


class _Look(Unpickler):
    """Unpickler that checks a pickle of torch's zip format for what torch's own reader does not
    bound."""

    def _persistent(self) -> None:
        self.stack[-1] = None  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = Unpickler.dispatch | {pickle.BINPERSID[0]: _persistent}


def _look_through(path: Path) -> set[tuple[str, str]]:
    """Check all pickles of a file and return the modules and names that they mention.

    Raises: TxlError if the archive claims more data than it has or an entry's checksum is wrong;
    UnpicklingError, or others, if a pickle is not plain data.
    """
    found: set[tuple[str, str]] = set()
    with zipfile.ZipFile(path) as archive:
        # torch.save does not compress; a compressed entry could expand to any size.
        claimed, have = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
        if claimed > have or any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise TxlError(f"claims {claimed:,} bytes, has {have:,}; torch.save compresses nothing")
        damaged = archive.testzip()
        if damaged is not None:  # torch's reader does not verify checksums
            raise TxlError(f"is damaged: the CRC-32 of {damaged!r} is not the one that was saved with it")
        for name in archive.namelist():
            if name.endswith(".pkl"):
                data = archive.read(name)
                look = _Look(io.BytesIO(data), len(data))
                look.load()
                found |= look._classes.keys()
    return found


def _reason(error: Exception) -> str:
    """Return torch's error in one line, without its advice on `safe_globals`."""
    text = str(error)
    unknown = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", text)
    if unknown is not None:
        return f"Unsupported class {unknown[1]}: neither a tensor, nor data, nor of the code whose files are read here"
    found = next((line for line in text.splitlines() if "nsupported" in line), text if len(text) < 200 else "")
    found = " ".join(found.split()).partition(" Please ")[0]
    return type(error).__name__ if not found or "safe_globals" in found else f"{type(error).__name__}: {found}"


def tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a safetensors or torch.save file, by name.

    Raises:
        TxlError: it is damaged, or holds other objects than tensors; the message names the file.
    """
    try:
        found: Any = load_file(path) if path.suffix == ".safetensors" else load(path)
    except (SafetensorError, OSError, TxlError) as error:
        raise TxlError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise TxlError(f"{path.name}: must hold tensors by name, got {type(found).__name__}")
    return {str(name): x for name, x in found.items()}
