"""Shuffles, reductions and elections within a warp, which also order its accesses."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import Fault, NotModelled
from ptx.lanes import WARP
from ptx.operands import pair, raw_reader, raw_writer, reader, spread, types_of, writer
from ptx.parse import Instruction

_ALL = 0xFFFFFFFF


def need_whole(lanes: Any) -> int:
    """Return the number of warps; raise Fault if a warp takes part without some of its threads."""
    if not lanes.whole:
        raise Fault("an instruction of the whole warp, by part of one")
    return len(lanes.warps)


def _all_members(x: Instruction) -> Callable[[Any, Any], int]:
    """Return a function that gives the number of warps; the last operand must name all of their
    threads."""
    mask = raw_reader(x.operands[-1], 32)

    def check(block: Any, lanes: Any) -> int:
        if (mask(block, lanes) != _ALL).any():
            raise NotModelled(f"{x.text}: a member mask of its own")
        return need_whole(lanes)

    return check


@instruction("shfl")
def shuffle(x: Instruction) -> Any:
    members = _all_members(x)
    mode = x.parts[2]
    result, valid = pair(x.operands[0])
    put, put_valid = raw_writer(result), raw_writer(valid)
    value, by, clamp = (raw_reader(y, 32) for y in x.operands[1:4])
    if mode not in ("bfly", "idx", "up", "down"):
        raise NotModelled(x.op)

    def run(block: Any, lanes: Any) -> None:
        members(block, lanes)
        given = spread(value(block, lanes), lanes)
        step, limits = (spread(f(block, lanes), lanes).astype(np.int64) for f in (by, clamp))
        lane = lanes.ids % WARP
        segment = limits >> 8 & 31
        low = lane & segment
        last = low | (limits & 31 & ~segment)
        if mode == "up":
            source = lane - step
            inside = source >= last
        else:
            source = {"bfly": lane ^ step, "idx": low | (step & ~segment & 31), "down": lane + step}[mode]
            inside = source <= last
        source = np.where(inside, source, lane)
        base = np.arange(lanes.n) // WARP * WARP
        put(block, lanes, given[base + source])
        put_valid(block, lanes, inside)
        block.order.meet_in_warps(lanes)

    return run


@instruction("redux")
def reduce(x: Instruction) -> Any:
    members = _all_members(x)
    t = types_of(x.parts)[0]
    functions: dict[str, Any] = {
        "min": np.fmin.reduce if t.kind == "f" else np.min, "max": np.fmax.reduce if t.kind == "f" else np.max,
        "add": np.sum, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce, "xor": np.bitwise_xor.reduce,
    }  # fmt: skip
    if x.parts[2] not in functions or t.bits != 32:
        raise NotModelled(x.op)
    function, value, put = functions[x.parts[2]], reader(x.operands[1], t), writer(x.operands[0], t)

    def run(block: Any, lanes: Any) -> None:
        warps = members(block, lanes)
        given = spread(value(block, lanes), lanes).reshape(warps, WARP)
        put(block, lanes, np.repeat(function(given, axis=1), WARP).astype(given.dtype))
        block.order.meet_in_warps(lanes)

    return run


@instruction("elect")
def elect(x: Instruction) -> Any:
    members = _all_members(x)
    leader, chosen = pair(x.operands[0])
    put_leader, put = raw_writer(leader), raw_writer(chosen)

    def run(block: Any, lanes: Any) -> None:
        members(block, lanes)
        put_leader(block, lanes, np.zeros(1, np.uint32))
        put(block, lanes, lanes.ids % WARP == 0)

    return run


@instruction("vote")
def vote(x: Instruction) -> Any:
    members = _all_members(x)
    if x.parts[2] not in ("any", "all") or "sync" not in x.parts:
        raise NotModelled(x.op)
    value, put = raw_reader(x.operands[1], 1), raw_writer(x.operands[0])
    function = np.any if x.parts[2] == "any" else np.all

    def run(block: Any, lanes: Any) -> None:
        warps = members(block, lanes)
        given = spread(value(block, lanes), lanes).reshape(warps, WARP)
        put(block, lanes, np.repeat(function(given, axis=1), WARP))
        block.order.meet_in_warps(lanes)

    return run
