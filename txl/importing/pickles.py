"""Reading of pickles and torch.save files without executing anything: data and tensors are
returned, and every other object is replaced by an inert one."""

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from txl.errors import TxlError
from txl.paths import utf8_path

_REFUSED = (
    pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.NEWOBJ_EX
)  # fmt: skip
_WIDEST_KEY = 2**61 - 1  # larger integers can differ and have the same hash
_MAX_DIMS = 64
_GROWTH = 4  # bound on the bytes of all tensors, a multiple of the file's: several names can share a storage

_NUMBER, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's older format
_BEGINS = pickle.dumps(_NUMBER, 2)
_DTYPES = {
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip


class Inert:
    """Inert replacement of a class, a function, or an object made by one. Items that a pickle adds
    to it are ignored.

    Attributes:
        kind: full name of the class or function.
        state: the state that the pickle would have set, or None.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def ignore(self, *items: Any) -> None:
        """Accept and ignore items."""

    append = extend = update = __setitem__ = ignore


def _check_keys(keys: Iterable[Any]) -> None:
    """Raise UnpicklingError for a key that could be slow to hash (nested or a very large
    integer)."""
    for key in keys:
        plain = key is None or type(key) in (str, bytes, bool, float) or (type(key) is int and abs(key) < _WIDEST_KEY)
        if not plain and not isinstance(key, Inert):
            raise pickle.UnpicklingError(f"a key that is {type(key).__name__}")


class Unpickler(pickle._Unpickler):
    """Unpickler for data and tensors, derived from Python's pure-Python unpickler.

    A name is never imported, and nothing on the stack can be called: a name becomes `Inert`, and
    the few functions in `_call` are known by it. Nothing much larger than the file is allocated or
    copied. Keys of dictionaries and members of sets must be plain, since hashing nested objects can
    take unlimited time.

    Attributes:
        buffers: the storages that were read, by key.
    """

    def __init__(self, file: Any, size: int, read: Callable[[str, int], bytearray] | None = None) -> None:
        """
        Args:
            size: bytes of the file.
            read: returns the bytes of a storage, for its key and size; None if there are none.
        """
        # Strings of Python 2 may be UTF-8 or binary data.
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self.read_storage, self.buffers, self._left = read, dict[str, bytearray](), _GROWTH * size

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("claims more than the file has")

    def find_class(self, module: str, name: str) -> Any:
        return Inert(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return a class, whose source is ignored, or a storage as a tensor [elements]."""
        match pid:
            case ("module", Inert(), *_):
                return pid[1]
            case ("storage", Inert(kind=kind), str(key), _, int(count)) | (
                "storage", Inert(kind=kind), str(key), _, int(count), None
            ) if kind in _DTYPES and self.read_storage and count >= 0:  # fmt: skip
                dtype = _DTYPES[kind]
                if key not in self.buffers:
                    self._spend(count * dtype.itemsize)
                    self.buffers[key] = self.read_storage(key, count * dtype.itemsize)
                buffer = self.buffers[key]
                if len(buffer) != count * dtype.itemsize:
                    raise pickle.UnpicklingError("a storage of another size")
                return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype, device="cpu")
        raise pickle.UnpicklingError("a persistent id of no known form")

    def _call(self, function: Any, args: Any) -> Any:
        """Return what a pickle's call of a function or a class gives."""
        if not isinstance(function, Inert) or type(args) not in (list, tuple):
            raise pickle.UnpicklingError(f"calls {type(function).__name__}")
        self._spend(len(args))
        match function.kind:
            case "collections.OrderedDict":
                return self._dict(*args)
            case "torch._utils._rebuild_tensor_v2":
                return self._tensor(*args)
            case "torch._utils._rebuild_parameter" | "torch.nn.parameter.Parameter":
                return args[0]
        return Inert(function.kind)

    def _dict(self, pairs: Any = ()) -> dict[Any, Any]:
        if type(pairs) not in (list, tuple) or not all(type(x) in (list, tuple) and len(x) == 2 for x in pairs):
            raise pickle.UnpicklingError("a dictionary of no pairs")
        self._spend(len(pairs))
        _check_keys(key for key, _ in pairs)
        return dict(pairs)

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
        """Return a view of a storage, after checking that it lies inside."""
        if isinstance(storage, Inert):  # not of torch.save, but of a plain pickle
            return storage
        shaped = type(size) is type(stride) is tuple and len(size) == len(stride) <= _MAX_DIMS
        numbers = (offset, *size, *stride) if shaped else (None,)
        plain = all(type(n) is int and 0 <= n < 2**63 for n in numbers)  # 63 bits, so that their product is short
        if type(storage) is not Tensor or not plain:
            raise pickle.UnpicklingError("a tensor of no known form")
        count, held = math.prod(size), storage.untyped_storage().nbytes() // storage.itemsize
        self._spend(count * storage.itemsize)
        if count and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= held:
            raise pickle.UnpicklingError(f"a tensor {list(size)} in a storage of {held} elements")
        return storage.as_strided(size, stride, offset) if count else storage.new_empty(size)

    def _top(self, kind: type) -> Any:
        """Return the object on the stack that items are added to."""
        found = self.stack[-1]  # type: ignore[attr-defined]
        if type(found) is not kind and not isinstance(found, Inert):
            raise pickle.UnpicklingError(f"adds items to {type(found).__name__}")
        return found

    def _instantiate(self, function: Any, args: Any) -> None:  # for OBJ and INST
        self.append(self._call(function, args))  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._instantiate(function, args)

    def _build(self) -> None:
        state = self.stack.pop()  # type: ignore[attr-defined]
        if isinstance(self.stack[-1], Inert):  # type: ignore[attr-defined]
            self.stack[-1].state = state  # type: ignore[attr-defined]

    def _append(self) -> None:
        item = self.stack.pop()  # type: ignore[attr-defined]
        self._top(list).append(item)

    def _appends(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self._top(list).extend(items)

    def _set_items(self, items: Sequence[Any]) -> None:
        _check_keys(items[::2])
        found = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[key] = value

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self._set_items((key, value))

    def _setitems(self) -> None:
        self._set_items(self.pop_mark())  # type: ignore[attr-defined]

    def _make_dict(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.append({})  # type: ignore[attr-defined]
        self._set_items(items)

    def _additems(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        _check_keys(items)
        self._top(set).update(items)

    def _frozenset(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        _check_keys(items)
        self.append(frozenset(items))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED
    } | {
        pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _reduce, pickle.BUILD[0]: _build, pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends, pickle.SETITEM[0]: _setitem, pickle.SETITEMS[0]: _setitems, pickle.DICT[0]: _make_dict,
        pickle.ADDITEMS[0]: _additems, pickle.FROZENSET[0]: _frozenset,
    }  # fmt: skip


def is_one(path: Path) -> bool:
    """Whether a file looks like one written by torch.save."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGINS)) == _BEGINS or zipfile.is_zipfile(path)


def load(path: Path) -> Any:
    """Return the object in a pickle or a torch.save file, with tensors on the CPU.

    Raises:
        TxlError: the file is damaged, uses operations that data does not need, or claims more data
            than it has.
    """
    try:
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            return _load_zip(path, size)
        with path.open("rb") as file:
            return _load_legacy(file, size) if is_one(path) else Unpickler(io.BytesIO(file.read()), size).load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = " ".join(str(error).split())[:200]
        raise TxlError(f"not a whole file of tensors and data ({type(error).__name__}: {reason})") from error


def _load_zip(path: Path, size: int) -> Any:
    """Read torch.save's zip format: a pickle, and an entry for each storage. Raises exceptions of
    any type."""
    with zipfile.ZipFile(path) as archive:
        # torch.save does not compress; a compressed entry could expand to any size.
        entries = archive.infolist()
        plain = all(x.compress_type == zipfile.ZIP_STORED and x.compress_size == x.file_size for x in entries)
        if not plain or sum(x.file_size for x in entries) > size:
            raise pickle.UnpicklingError("claims more bytes than it has; torch.save compresses nothing")
        damaged = archive.testzip()
        if damaged is not None:
            raise pickle.UnpicklingError(f"the CRC-32 of {damaged!r} is not the one that was saved with it")
        name = next(x for x in archive.namelist() if x.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise pickle.UnpicklingError("its bytes are not in little-endian order")
        data = io.BytesIO(archive.read(name))
        return Unpickler(data, size, lambda key, _: bytearray(archive.read(f"{folder}data/{key}"))).load()


def _load_legacy(file: BinaryIO, size: int) -> Any:
    """Read torch.save's older format: five pickles (magic number, version, sizes of integers, the
    object, keys of its storages), then each storage, preceded by its length. Raises exceptions of
    any type."""
    number, version, sizes = (Unpickler(file, size).load() for _ in range(3))
    if number != _NUMBER or version != _VERSION or not sizes.get("little_endian"):
        raise pickle.UnpicklingError("of another version, or big-endian")
    reader = Unpickler(file, size, lambda _, count: bytearray(count))
    found, keys = reader.load(), Unpickler(file, size).load()
    if not all(type(key) is str for key in keys) or sorted(keys) != sorted(reader.buffers):
        raise pickle.UnpicklingError("its storages are not those that it lists")
    for key in keys:  # the tensors share the buffers' memory
        buffer, count = reader.buffers[key], int.from_bytes(file.read(8), "little")
        cut = file.readinto(buffer) != len(buffer)  # type: ignore[attr-defined]
        if cut or bool(count) != bool(buffer) or (count and len(buffer) % count):
            raise pickle.UnpicklingError("a storage is cut off, or of another size")
    return found


def tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors in a safetensors or torch.save file, by name.

    Raises:
        TxlError: it is damaged, or holds other objects than tensors; the message names the file.
    """
    try:
        with utf8_path(path) as name:
            found: Any = load_file(name) if path.suffix == ".safetensors" else load(path)
    except (SafetensorError, OSError, TxlError) as error:
        raise TxlError(f"{path.name}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise TxlError(f"{path.name}: must hold tensors by name, got {type(found).__name__}")
    return {str(name): x for name, x in found.items()}
