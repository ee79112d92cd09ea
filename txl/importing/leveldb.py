"""Tables of LevelDB's format, in which TensorFlow keeps the index of a checkpoint."""

from collections.abc import Iterator

from txl.importing.crc32c import masked
from txl.importing.protobuf import varint

_MAGIC = 0xDB4775248B80FB57
_LONGEST_KEY = 1000
_FOOTER, _TRAILER = 48, 5  # bytes; a block's trailer is its compression and its checksum


def entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values, in order.

    Raises:
        ValueError: the table is damaged, truncated, or compressed (TensorFlow compresses none).
    """
    if len(table) < _FOOTER or int.from_bytes(table[-8:], "little") != _MAGIC:
        raise ValueError("no table of LevelDB's format, or truncated")
    footer = table[-_FOOTER:]
    offset, size, at = _handle(footer, 0)
    for _ in _block(table, offset, size):  # of filters, which TensorFlow has none of; its checksum holds
        pass
    offset, size, _ = _handle(footer, at)
    last, end = None, 0
    for _, handle in _block(table, offset, size):
        offset, size, _ = _handle(handle, 0)
        if offset < end:
            raise ValueError("blocks are not in order")
        end = offset + size + _TRAILER
        for key, value in _block(table, offset, size):
            if last is not None and key <= last:
                raise ValueError("keys are not in order")
            last = key
            yield key, value


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    """Offset and size of a block, and where they end."""
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return offset, size, at


def _block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    end = offset + size
    if end + _TRAILER > len(table) - _FOOTER:
        raise ValueError(f"a block at {offset} of {size} bytes is outside of the {len(table)}")
    if int.from_bytes(table[end + 1 : end + _TRAILER], "little") != masked(table[offset : end + 1]):
        raise ValueError(f"the block at {offset} is damaged: its checksum is not that of its contents")
    if table[end] != 0:
        raise ValueError(f"compression {table[end]} is not supported")
    block = table[offset:end]
    if size < 4:
        raise ValueError("a block without restarts")
    stop = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    at, key = 0, b""
    if stop < 0:
        raise ValueError("a block of more restarts than it has bytes")
    while at < stop:
        shared, at = varint(block, at)
        own, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or own + length > stop - at:
            raise ValueError("an entry is cut off")
        if shared + own > _LONGEST_KEY:
            raise ValueError("a name without end")
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + length]
        at += own + length
