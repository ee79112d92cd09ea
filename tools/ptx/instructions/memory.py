"""Loads, stores and atomic additions."""

from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import Fault, NotModelled
from ptx.operands import (
    PARAM_BASE,
    RAW,
    Type,
    address_reader,
    elements,
    items,
    raw_reader,
    raw_writer,
    reader,
    spread,
    types_of,
    writer,
)
from ptx.parse import Instruction

_CACHING = {"nc", "ca", "cg", "cs", "relaxed", "gpu", "cta", "sys", "weak", "v2", "v4", "L1_evict_last", "L1_evict_first",
            "L1_no_allocate", "L2_128B", "L2_64B", "L2_256B", "L2_cache_hint"}  # fmt: skip


def space_and_width(x: Instruction) -> tuple[str, Type, int]:
    """Return (memory space, type of an element, number of elements)."""
    space = x.parts[1].removesuffix("_cta")
    (t,) = types_of(x.parts[1:])
    unknown = [p for p in x.parts[2:] if p not in _CACHING and not types_of((p,))]
    if unknown or space not in ("global", "shared", "param"):
        raise NotModelled(x.op)
    return space, t, elements(x.parts)


@instruction("ld")
def load(x: Instruction) -> Any:
    space, t, count = space_and_width(x)
    puts = [raw_writer(item) for item in items(x.operands[0])]
    width, dtype = t.bits // 8 * count, RAW[t.bits]
    address = address_reader(x.operands[1], 32 if space == "shared" else 64)

    def fetch(block: Any, lanes: Any) -> np.ndarray:
        at = address(block, lanes)
        if space == "shared":
            return np.asarray(block.shared.read(at, width, lanes.ids))
        if block.counts is not None:
            block.counts.global_access(at, width, lanes.warp)
        return np.asarray(block.memory.read(at, width, block.thread_number[lanes.at]))

    def parameter(block: Any, lanes: Any) -> np.ndarray:
        at = address(block, lanes)
        offset = at.astype(np.int64) - PARAM_BASE
        if offset.min() < 0 or offset.max() + width > len(block.launch.params):
            raise Fault(
                f"bytes {offset.min()}..{offset.max() + width} of {len(block.launch.params)} bytes of parameters"
            )
        data = np.frombuffer(block.launch.params, np.uint8)
        if (offset == offset[0]).all():
            return data[None, offset[0] : offset[0] + width]
        return data[offset[:, None] + np.arange(width)]

    get = parameter if space == "param" else fetch

    def run(block: Any, lanes: Any) -> None:
        values = np.ascontiguousarray(get(block, lanes)).view(dtype)
        for k, put in enumerate(puts):
            put(block, lanes, values[:, k])

    return run


@instruction("st")
def store(x: Instruction) -> Any:
    space, t, _ = space_and_width(x)
    address = address_reader(x.operands[0], 32 if space == "shared" else 64)
    values = [raw_reader(item, t.bits) for item in items(x.operands[1])]

    def run(block: Any, lanes: Any) -> None:
        at = address(block, lanes)
        data = np.stack([spread(value(block, lanes), lanes) for value in values], 1).view(np.uint8)
        if space == "shared":
            block.shared.write(at, data, lanes.ids)
        else:
            if block.counts is not None:
                block.counts.global_access(at, data.shape[1], lanes.warp)
            block.memory.write(at, data, block.thread_number[lanes.at])

    if space == "param":
        raise NotModelled(x.op)
    return run


@instruction("atom", "red")
def add_atomically(x: Instruction) -> Any:
    known = {"global", "gpu", "relaxed", "add", "f32", "v2", "v4"}
    if not set(x.parts[1:]) <= known or "add" not in x.parts or "f32" not in x.parts or "global" not in x.parts:
        raise NotModelled(x.op)
    operands = [None, *x.operands] if x.parts[0] == "red" else x.operands
    t = Type("f", 32)
    address, values = address_reader(operands[1], 64), [reader(item, t) for item in items(operands[2])]
    puts = [writer(item, t) for item in items(operands[0])] if operands[0] is not None else []
    if puts and len(puts) != len(values):
        raise NotModelled(x.text)

    def run(block: Any, lanes: Any) -> None:
        at = address(block, lanes)
        if block.counts is not None:
            block.counts.global_access(at, 4 * len(values), lanes.warp)
        for k, value in enumerate(values):
            before = block.memory.add_float32(at + np.uint64(4 * k), spread(value(block, lanes), lanes))
            if puts:
                puts[k](block, lanes, before)

    return run
