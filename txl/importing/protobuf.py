"""Just enough of protocol buffers' wire format to read small messages."""

from typing import NamedTuple

_LONGEST_VARINT = 10
_FIXED = {1: 8, 5: 4}  # wire type: bytes


class Message(NamedTuple):
    """Fields by number: of varints and fixed numbers the last value, of bytes all of them."""

    numbers: dict[int, int]
    parts: dict[int, list[bytes]]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number, and where it ends.

    Raises:
        ValueError: the data end within it, or it is longer than 64 bits.
    """
    value = 0
    for n in range(_LONGEST_VARINT):
        if at + n >= len(data):
            raise ValueError("a number is cut off")
        value |= (data[at + n] & 0x7F) << (7 * n)
        if data[at + n] < 0x80:
            if value >= 2**64:
                break
            return value, at + n + 1
    raise ValueError("a number of more than 64 bits")


def parse(data: bytes) -> Message:
    """Raises ValueError: the message is damaged."""
    found, at = Message({}, {}), 0
    while at < len(data):
        tag, at = varint(data, at)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            found.numbers[field], at = varint(data, at)
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"wire type {kind} is none")
        if size > len(data) - at:
            raise ValueError("a field is cut off")
        if kind == 2:
            found.parts.setdefault(field, []).append(data[at : at + size])
        else:
            found.numbers[field] = int.from_bytes(data[at : at + size], "little")
        at += size
    return found
