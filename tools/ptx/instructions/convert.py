"""cvt: conversion between number types."""

from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.operands import RAW, SIGNED, Type, raw_writer, reader, to_bf16, type_of, writer
from ptx.parse import Instruction

_HOW = {"rn", "rni", "rzi", "rmi", "rpi", "ftz", "rna"}
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FLOAT32 = Type("f", 32)


@instruction("cvt")
def convert(x: Instruction) -> Any:
    *how, to, source = x.parts[1:]
    if not set(how) <= _HOW:
        raise NotModelled(x.op)
    if to in ("bf16x2", "f16x2") and source == "f32":
        return _two_halves(x, to)
    target, given = type_of(to), type_of(source)
    if target is None or given is None or "pred" in (target.kind, given.kind):
        raise NotModelled(x.op)
    a = reader(x.operands[1], given)
    if target.kind == "tf":
        if how != ["rna"]:
            raise NotModelled(x.op)
        put_raw = raw_writer(x.operands[0])

        def round_tf32(block: Any, lanes: Any) -> None:
            bits = a(block, lanes).view(np.uint32).astype(np.uint64)
            put_raw(block, lanes, ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32))

        return round_tf32
    put = writer(x.operands[0], target)
    if target.kind in ("f", "bf"):
        wide = np.float64 if given.kind in ("s", "u") else np.float32
        if target.kind == "f":
            wide = {16: np.float16, 32: np.float32, 64: np.float64}[target.bits]
        return lambda block, lanes: put(block, lanes, a(block, lanes).astype(wide))
    dtype = (SIGNED if target.kind == "s" else RAW)[target.bits]
    if given.kind in ("f", "bf"):
        (rounding,) = (_ROUND[h] for h in how if h in _ROUND)
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

        def saturate(block: Any, lanes: Any) -> None:
            y = np.nan_to_num(rounding(a(block, lanes).astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
            inside = np.clip(y, float(low), float(high))
            put(block, lanes, np.where(y >= float(high), high, inside.astype(np.int64)).astype(dtype))

        return saturate
    return lambda block, lanes: put(block, lanes, a(block, lanes).astype(dtype))


def _two_halves(x: Instruction, to: str) -> Any:
    """cvt with two sources: the first operand becomes the upper half."""
    upper, lower, put = reader(x.operands[1], _FLOAT32), reader(x.operands[2], _FLOAT32), raw_writer(x.operands[0])

    def half(y: np.ndarray) -> np.ndarray:
        bits = to_bf16(y) if to == "bf16x2" else y.astype(np.float16).view(np.uint16)
        return bits.astype(np.uint32)

    return lambda block, lanes: put(
        block, lanes, half(lower(block, lanes)) | half(upper(block, lanes)) << np.uint32(16)
    )
