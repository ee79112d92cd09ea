"""Arithmetic: add, mul, fma, min, comparisons and bit operations."""

from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.operands import RAW, SIGNED, Type, constant, raw_reader, raw_writer, reader, to_bf16, types_of, writer
from ptx.parse import Instruction

# Qualifiers without effect here: numpy's own rounding, and flushes of subnormals.
_PLAIN = {"rn", "ftz", "approx", "full", "lo", "wide", "hi", "relu"}


def _type(x: Instruction, *more: str) -> Type:
    """Return the type of an instruction that has one; more: qualifiers that the caller handles."""
    found = types_of(x.parts[1:])
    unknown = [p for p in x.parts[1:] if p not in _PLAIN and p not in more and not types_of((p,))]
    if unknown or len(found) != 1:
        raise NotModelled(f"{x.op}: {unknown or found}")
    return found[0]


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return a / b
    sign = np.where((a < 0) != (b < 0), -1, 1)
    return (np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1) * sign).astype(a.dtype)


_BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "rem": np.fmod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


_PAIRS = ("bf16x2", "f16x2")


def _of_pairs(x: Instruction, function: Any) -> Any:
    """A function of the halves of 32-bit registers, computed in float64."""
    if not set(x.parts[1:-1]) <= {"rn", "ftz"}:
        raise NotModelled(x.op)
    sources, put = [raw_reader(operand, 32) for operand in x.operands[1:]], raw_writer(x.operands[0])

    def widened(bits: np.ndarray) -> np.ndarray:
        if x.parts[-1] == "bf16x2":
            return (bits << np.uint32(16)).view(np.float32).astype(np.float64)
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)

    def rounded(y: np.ndarray) -> np.ndarray:
        bits = to_bf16(y.astype(np.float32)) if x.parts[-1] == "bf16x2" else y.astype(np.float16).view(np.uint16)
        return bits.astype(np.uint32)

    def run(block: Any, lanes: Any) -> None:
        pairs = [source(block, lanes).astype(np.uint32) for source in sources]
        low = function(*(widened(pair & np.uint32(0xFFFF)) for pair in pairs))
        high = function(*(widened(pair >> np.uint32(16)) for pair in pairs))
        put(block, lanes, rounded(low) | rounded(high) << np.uint32(16))

    return run


@instruction("add", "sub", "div", "rem", "and", "or", "xor")
def binary(x: Instruction) -> Any:
    function = _BINARY[x.parts[0]]
    if x.parts[-1] in _PAIRS:
        return _of_pairs(x, function)
    t = _type(x)
    a, b, put = reader(x.operands[1], t), reader(x.operands[2], t), writer(x.operands[0], t)
    return lambda block, lanes: put(block, lanes, function(a(block, lanes), b(block, lanes)))


@instruction("min", "max")
def extreme(x: Instruction) -> Any:
    t = _type(x, "NaN")
    a, b, put = reader(x.operands[1], t), reader(x.operands[2], t), writer(x.operands[0], t)
    loses_nan = t.kind in ("f", "bf") and "NaN" not in x.parts
    function = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}[x.parts[0]][loses_nan]
    if "relu" in x.parts:
        return lambda block, lanes: put(block, lanes, np.maximum(function(a(block, lanes), b(block, lanes)), 0))
    return lambda block, lanes: put(block, lanes, function(a(block, lanes), b(block, lanes)))


@instruction("mul", "mad")
def multiply(x: Instruction) -> Any:
    t = _type(x)
    a, b = reader(x.operands[1], t), reader(x.operands[2], t)
    part = next((p for p in ("wide", "hi") if p in x.parts), "lo")
    if t.kind not in ("s", "u", "b") and (part != "lo" or x.parts[0] == "mad"):
        raise NotModelled(x.op)
    result = Type(t.kind, 2 * t.bits) if part == "wide" else t
    put = writer(x.operands[0], result)
    if t.kind in ("s", "u", "b") and part != "lo":
        if t.bits == 64:
            raise NotModelled(x.op)
        wide = (SIGNED if t.kind == "s" else RAW)[2 * t.bits]

        def product(block: Any, lanes: Any) -> np.ndarray:
            y = a(block, lanes).astype(wide) * b(block, lanes).astype(wide)
            return y if part == "wide" else (y >> t.bits).astype(a(block, lanes).dtype)
    else:

        def product(block: Any, lanes: Any) -> np.ndarray:
            return np.asarray(a(block, lanes) * b(block, lanes))

    if x.parts[0] == "mul":
        return lambda block, lanes: put(block, lanes, product(block, lanes))
    c = reader(x.operands[3], result)
    return lambda block, lanes: put(block, lanes, product(block, lanes) + c(block, lanes))


@instruction("fma")
def fused(x: Instruction) -> Any:
    """fma: the product is exact in float64; the sum is rounded twice, which rarely makes a
    difference."""
    if x.parts[-1] in _PAIRS:
        return _of_pairs(x, lambda a, b, c: a * b + c)
    t = _type(x)
    if t != Type("f", 32):
        raise NotModelled(x.op)
    a, b, c = (reader(operand, t) for operand in x.operands[1:])
    put = writer(x.operands[0], t)

    def run(block: Any, lanes: Any) -> None:
        product = a(block, lanes).astype(np.float64) * b(block, lanes)
        put(block, lanes, (product + c(block, lanes)).astype(np.float32))

    return run


_UNARY: dict[str, Any] = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "not": np.invert,
    "rcp": lambda a: (1 / a).astype(a.dtype), "rsqrt": lambda a: (1 / np.sqrt(a)).astype(a.dtype),
}  # fmt: skip


@instruction(*_UNARY)
def unary(x: Instruction) -> Any:
    t = _type(x)
    a, put, function = reader(x.operands[1], t), writer(x.operands[0], t), _UNARY[x.parts[0]]
    return lambda block, lanes: put(block, lanes, function(a(block, lanes)))


@instruction("shl", "shr")
def shift(x: Instruction) -> Any:
    t = _type(x)
    a, by, put = reader(x.operands[1], t), raw_reader(x.operands[2], 32), writer(x.operands[0], t)
    left, signed, bits = x.parts[0] == "shl", t.kind == "s", t.bits

    def run(block: Any, lanes: Any) -> None:
        value, n = a(block, lanes), by(block, lanes)
        step = np.minimum(n, bits - 1).astype(value.dtype)
        y = value << step if left else value >> step
        put(block, lanes, y if signed else np.where(n >= bits, 0, y).astype(value.dtype))

    return run


@instruction("bfe")
def bit_field(x: Instruction) -> Any:
    t = _type(x)
    a, at, length = raw_reader(x.operands[1], t.bits), raw_reader(x.operands[2], 32), raw_reader(x.operands[3], 32)
    put = raw_writer(x.operands[0])
    one = np.uint64(1)

    def run(block: Any, lanes: Any) -> None:
        first, n = (f(block, lanes).astype(np.uint64) & np.uint64(255) for f in (at, length))
        mask = (one << n) - one
        y = (a(block, lanes).astype(np.uint64) >> first) & mask
        if t.kind == "s":
            y = np.where((y >> (n - one)) & one, y | ~mask, y)
        put(block, lanes, y.astype(RAW[t.bits]))

    return run


@instruction("bfi")
def insert_bits(x: Instruction) -> Any:
    """bfi.b32 and .b64: insert the low bits of the first operand into the second."""
    t = _type(x)
    a, b = raw_reader(x.operands[1], t.bits), raw_reader(x.operands[2], t.bits)
    at, length, put = constant(x.operands[3]), constant(x.operands[4]), raw_writer(x.operands[0])
    mask = RAW[t.bits](((1 << length) - 1 << at) & ((1 << t.bits) - 1))
    shift = RAW[t.bits](at)
    return lambda block, lanes: put(block, lanes, (b(block, lanes) & ~mask) | (a(block, lanes) << shift & mask))


@instruction("prmt")
def permute(x: Instruction) -> Any:
    """prmt: each byte of the result is one of eight bytes, or the sign of one."""
    if x.op != "prmt.b32":
        raise NotModelled(x.op)
    a, b, selector = (raw_reader(operand, 32) for operand in x.operands[1:])
    put = raw_writer(x.operands[0])

    def run(block: Any, lanes: Any) -> None:
        low, high, chosen = np.broadcast_arrays(a(block, lanes), b(block, lanes), selector(block, lanes))
        both = np.stack([low, high], 1).view(np.uint8)
        y = np.empty((len(low), 4), np.uint8)
        for k in range(4):
            nibble = (chosen >> np.uint32(4 * k)) & 15
            byte = both[np.arange(len(low)), nibble & 7]
            y[:, k] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        put(block, lanes, y.view(np.uint32).ravel())

    return run


_COMPARE: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@instruction("setp")
def compare(x: Instruction) -> Any:
    t = _type(x, x.parts[1])
    a, b, put = reader(x.operands[1], t), reader(x.operands[2], t), raw_writer(x.operands[0])
    if len(x.operands) != 3:
        raise NotModelled(x.op)
    how, floats = x.parts[1], t.kind in ("f", "bf")
    unordered = floats and how.endswith("u") and how[:-1] in _COMPARE
    if how in ("num", "nan"):

        def run(block: Any, lanes: Any) -> None:
            either = np.isnan(a(block, lanes)) | np.isnan(b(block, lanes))
            put(block, lanes, either if how == "nan" else ~either)

        return run
    function = _COMPARE.get(how[:-1] if unordered else how)
    if function is None:
        raise NotModelled(x.op)

    def run_comparison(block: Any, lanes: Any) -> None:
        left, right = a(block, lanes), b(block, lanes)
        y = function(left, right)
        if unordered:
            y = y | np.isnan(left) | np.isnan(right)
        elif floats and how == "ne":
            y = y & ~(np.isnan(left) | np.isnan(right))
        put(block, lanes, y)

    return run_comparison


@instruction("selp")
def select(x: Instruction) -> Any:
    t = _type(x)
    a, b = raw_reader(x.operands[1], t.bits), raw_reader(x.operands[2], t.bits)
    which, put = raw_reader(x.operands[3], 1), raw_writer(x.operands[0])
    return lambda block, lanes: put(block, lanes, np.where(which(block, lanes), a(block, lanes), b(block, lanes)))
