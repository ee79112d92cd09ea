"""mov, with packing and unpacking, and cvta."""

from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.operands import RAW, raw_reader, raw_writer, types_of
from ptx.parse import Instruction, Vector


@instruction("mov")
def move(x: Instruction) -> Any:
    (t,) = types_of(x.parts[1:])
    to, given = x.operands
    if isinstance(to, Vector):
        width = t.bits // len(to.items)
        parts = [raw_writer(item) for item in to.items]
        whole = raw_reader(given, t.bits)

        def unpack(block: Any, lanes: Any) -> None:
            value = whole(block, lanes)
            for k, put in enumerate(parts):
                put(block, lanes, (value >> RAW[t.bits](k * width)).astype(RAW[width]))

        return unpack
    put = raw_writer(to)
    if isinstance(given, Vector):
        width = t.bits // len(given.items)
        pieces = [raw_reader(item, width) for item in given.items]

        def pack(block: Any, lanes: Any) -> None:
            value = np.zeros(1, RAW[t.bits])
            for k, piece in enumerate(pieces):
                value = value | piece(block, lanes).astype(RAW[t.bits]) << RAW[t.bits](k * width)
            put(block, lanes, value)

        return pack
    source = raw_reader(given, t.bits)
    return lambda block, lanes: put(block, lanes, source(block, lanes))


@instruction("cvta")
def address_space(x: Instruction) -> Any:
    """cvta: generic addresses equal those of global memory and of the parameters."""
    if not set(x.parts[1:]) <= {"to", "global", "param", "u64"}:
        raise NotModelled(x.op)
    put, source = raw_writer(x.operands[0]), raw_reader(x.operands[1], 64)
    return lambda block, lanes: put(block, lanes, source(block, lanes))
