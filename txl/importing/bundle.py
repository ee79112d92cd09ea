"""TensorFlow's checkpoints, read without TensorFlow: PREFIX.index and PREFIX.data-0000i-of-0000n.

The index is a LevelDB table of a header, under the empty key, and of an entry for each tensor
(tensorflow/core/protobuf/tensor_bundle.proto); the data are the tensors' bytes, little-endian.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.importing.crc32c import masked
from txl.importing.leveldb import entries
from txl.importing.protobuf import parse

_MOST_INDEX = 2**28  # bytes
_MOST_SHARDS = 10_000
DTYPES = {1: torch.float32, 2: torch.float64, 3: torch.int32, 9: torch.int64, 14: torch.bfloat16, 19: torch.float16}


class Entry(NamedTuple):
    """Where a tensor lies. dtype: TensorFlow's number."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int


class Bundle:
    """A checkpoint's tensors by name.

    Attributes:
        entries: by name; none is outside of its file, and together they are no longer than it.
    """

    def __init__(self, prefix: Path) -> None:
        """Raises TxlError: a file is missing, damaged, or of another form."""
        self._prefix = prefix
        self._index = prefix.with_name(prefix.name + ".index")
        try:
            if self._index.stat().st_size > _MOST_INDEX:
                raise ValueError(f"more than {_MOST_INDEX:,} bytes")
            table = dict(entries(self._index.read_bytes()))
            header = parse(table.pop(b"")).numbers
            self._shards = header.get(1, 0)
            if not 1 <= self._shards <= _MOST_SHARDS or header.get(2, 0) != 0:
                raise ValueError(f"{self._shards} data files, byte order {header.get(2, 0)}")
            self.entries = {key.decode(): _entry(value) for key, value in table.items()}
            self._check_places()
        except KeyError:
            raise TxlError(f"{self._index}: not an index of TensorFlow's: has no header") from None
        except (OSError, ValueError) as error:
            raise TxlError(f"{self._index}: not a whole index of TensorFlow's: {error}") from error

    def path(self, shard: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}.data-{shard:05d}-of-{self._shards:05d}")

    def _check_places(self) -> None:
        claimed: dict[int, int] = {}
        for name, entry in self.entries.items():
            if entry.shard >= self._shards:
                raise ValueError(f"{name} lies in data file {entry.shard} of {self._shards}")
            have = self.path(entry.shard).stat().st_size
            claimed[entry.shard] = claimed.get(entry.shard, 0) + entry.size
            if entry.offset + entry.size > have or claimed[entry.shard] > have:
                raise ValueError(f"{name} is outside of {self.path(entry.shard).name}, which has {have:,} bytes")

    def tensor(self, name: str) -> Tensor:
        """Raises TxlError: it is of a kind that is not read, damaged, or its size is not its
        shape's."""
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise TxlError(f"{self._index}: {name} is of type {entry.dtype}, which is not read")
        if math.prod(entry.shape) * dtype.itemsize != entry.size:
            raise TxlError(f"{self._index}: {name} of shape {list(entry.shape)} cannot have {entry.size:,} bytes")
        path = self.path(entry.shard)
        with path.open("rb") as file:
            file.seek(entry.offset)
            data = bytearray(file.read(entry.size))
        if len(data) != entry.size or masked(memoryview(data)) != entry.checksum:
            raise TxlError(f"{path}: {name} is damaged: its checksum is not that of its contents")
        if not data:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(entry.shape)


def _entry(value: bytes) -> Entry:
    """BundleEntryProto: dtype 1, shape 2 (TensorShapeProto: dims 2, their sizes 1), shard_id 3,
    offset 4, size 5, crc32c 6, slices 7."""
    message = parse(value)
    if 7 in message.parts:
        raise ValueError("a tensor kept in slices is not read")
    shape = [parse(dim).numbers.get(1, 0) for part in message.parts.get(2, []) for dim in parse(part).parts.get(2, [])]
    numbers = [message.numbers.get(field, 0) for field in (3, 4, 5, 6)]
    if max(shape, default=0) >= 2**63:
        raise ValueError("a shape that is not known")
    return Entry(message.numbers.get(1, 0), tuple(shape), *numbers)
