"""Reading and writing of operands as arrays over the executing threads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx.faults import NotModelled
from ptx.lanes import Lanes
from ptx.parse import Address, Immediate, Operand, Register, Special, Symbol, Vector

if TYPE_CHECKING:
    from ptx.block import Block

Read = Callable[["Block", Lanes], np.ndarray]
Write = Callable[["Block", Lanes, np.ndarray], None]
RAW = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
PARAM_BASE = 1 << 30  # address of the parameters, also as a generic address; it fits into 32 bits


class Type(NamedTuple):
    kind: str  # b, u, s, f, bf or pred; tf for tf32
    bits: int


def type_of(part: str) -> Type | None:
    """Parse a type such as `s32` in an instruction's name; return None for any other part."""
    if part == "pred":
        return Type("pred", 1)
    if part == "tf32":
        return Type("tf", 32)
    for kind in ("bf", "b", "u", "s", "f"):
        if part.startswith(kind) and part[len(kind) :] in ("8", "16", "32", "64"):
            return Type(kind, int(part[len(kind) :]))
    return None


def types_of(parts: tuple[str, ...]) -> list[Type]:
    return [t for t in map(type_of, parts) if t is not None]


def elements(parts: tuple[str, ...]) -> int:
    """Return the number of elements of an access: 4 for `ld.shared.v4.b32`."""
    return next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)


def raw_reader(operand: Operand | None, bits: int) -> Read:
    """Return a reader of unsigned integers of `bits` bits, or of booleans: [n], or [1] if all
    threads have the same."""
    dtype = RAW[bits]
    if isinstance(operand, Register):
        slot = operand.slot
        if operand.bits == bits:
            return lambda block, lanes: block.get(slot, lanes)
        return lambda block, lanes: block.get(slot, lanes).astype(dtype)
    if isinstance(operand, Immediate):
        value = np.array([operand.value & ((1 << bits) - 1)], np.uint64).astype(dtype)
        return lambda block, lanes: value
    if isinstance(operand, (Special, Symbol)):
        name = operand.name
        return lambda block, lanes: block.named(name, lanes).astype(dtype)
    raise NotModelled(f"operand {operand}")


def constant(operand: Operand | None) -> int:
    """Return the value of an operand that must be a literal."""
    if not isinstance(operand, Immediate):
        raise NotModelled(f"{operand} is not a constant")
    return operand.value


def as_numbers(raw: np.ndarray, t: Type) -> np.ndarray:
    if t.kind == "s":
        return raw.view(SIGNED[t.bits])
    if t.kind == "f":
        return raw.view(FLOAT[t.bits])
    if t.kind == "bf":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw


def as_raw(x: np.ndarray, t: Type) -> np.ndarray:
    if t.kind == "bf":
        return to_bf16(x)
    if t.kind == "f":
        return np.ascontiguousarray(x, FLOAT[t.bits]).view(RAW[t.bits])
    if t.kind == "s":
        return np.ascontiguousarray(x).astype(SIGNED[t.bits], copy=False).view(RAW[t.bits])
    return x.astype(RAW[t.bits], copy=False)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bf16 (to nearest, ties to even), as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def reader(operand: Operand | None, t: Type) -> Read:
    """Return a reader of values of a type."""
    raw = raw_reader(operand, t.bits)
    if t.kind in ("b", "u", "pred"):
        return raw
    return lambda block, lanes: as_numbers(raw(block, lanes), t)


def raw_writer(operand: Operand | None) -> Write:
    if operand is None:
        return lambda block, lanes, x: None
    if not isinstance(operand, Register):
        raise NotModelled(f"result {operand}")
    slot, dtype = operand.slot, RAW[operand.bits]
    return lambda block, lanes, x: block.put(slot, x.astype(dtype, copy=False), lanes)


def writer(operand: Operand | None, t: Type) -> Write:
    raw = raw_writer(operand)
    return lambda block, lanes, x: raw(block, lanes, as_raw(x, t))


def items(operand: Operand | None) -> tuple[Operand | None, ...]:
    """Return the elements of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def pair(operand: Operand | None) -> tuple[Operand | None, Operand | None]:
    """Return the two operands of `a|p`, or a and None."""
    both = items(operand)
    if len(both) > 2:
        raise NotModelled(f"operand {operand}")
    return (both[0], both[1]) if len(both) == 2 else (both[0], None)


def address_reader(operand: Operand | None, bits: int) -> Read:
    """Return a reader of addresses [n]: int64 in shared memory (bits 32), uint64 elsewhere."""
    if not isinstance(operand, Address):
        raise NotModelled(f"address {operand}")
    offset = operand.offset
    if bits == 32:
        base32 = raw_reader(operand.base, 32)
        return lambda block, lanes: spread((base32(block, lanes).astype(np.int64) + offset) & 0xFFFFFFFF, lanes)
    base = raw_reader(operand.base, 64)
    return lambda block, lanes: spread((base(block, lanes).view(np.int64) + offset).view(np.uint64), lanes)


def spread(x: np.ndarray, lanes: Lanes) -> np.ndarray:
    """Broadcast [1] to one entry for each thread."""
    return x if len(x) == lanes.n else np.broadcast_to(x, (lanes.n,))
