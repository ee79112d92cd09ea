"""CRC-32C (Castagnoli, RFC 3720 appendix B.4), as TensorFlow and LevelDB store it."""

import functools

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78  # reflected
_LANES = 1 << 14  # stretches of data that advance together, a byte a step
_MASK = 0xA282EAD8

Words = NDArray[np.uint32]


@functools.cache
def _table() -> Words:
    """What a byte does to the register, [256]."""
    table: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


def _plain(data: bytes, register: int) -> int:
    table = _table()
    for byte in data:
        register = int(table[(register ^ byte) & 0xFF]) ^ (register >> 8)
    return register


@functools.lru_cache(maxsize=16)
def _after_zeros(count: int) -> list[int]:
    """What `count` zero bytes make of each of the register's bits: a matrix over GF(2), by
    squaring."""
    table = _table()
    step = [int(table[1 << bit]) if bit < 8 else 1 << (bit - 8) for bit in range(32)]
    result = [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            result = [_times(step, x) for x in result]
        step = [_times(step, x) for x in step]
        count >>= 1
    return result


def _times(matrix: list[int], register: int) -> int:
    product = 0
    for bit, column in enumerate(matrix):
        if register >> bit & 1:
            product ^= column
    return product


def crc32c(data: bytes | memoryview) -> int:
    """Of all of data. 100 MB take about a second."""
    values = np.frombuffer(data, np.uint8)
    length = len(values) // _LANES
    register = 0xFFFFFFFF
    if length:
        table, lanes = _table(), np.zeros(_LANES, np.uint32)
        stretches = values[: length * _LANES].reshape(_LANES, length)
        for first in range(0, length, 512):  # [steps, lanes]: a step's bytes next to each other
            for column in np.ascontiguousarray(stretches[:, first : first + 512].T):
                lanes = table[(lanes ^ column) & 0xFF] ^ (lanes >> 8)
        shift = _after_zeros(length)
        for lane in lanes.tolist():
            register = _times(shift, register) ^ lane
    return _plain(values[length * _LANES :].tobytes(), register) ^ 0xFFFFFFFF


def masked(data: bytes | memoryview) -> int:
    """The form in which a checksum is stored."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
