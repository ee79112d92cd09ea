"""Control: barriers, fences and exits."""

from typing import Any

from ptx.decode import instruction
from ptx.faults import NotModelled
from ptx.operands import constant
from ptx.parse import Immediate, Instruction


@instruction("bra", kind="branch")
def branch(x: Instruction) -> Any:
    return None


@instruction("ret", "exit", kind="exit")
def end(x: Instruction) -> Any:
    return None


@instruction("bar", "barrier", kind="barrier")
def barrier(x: Instruction) -> Any:
    """bar.sync and bar.arrive: (number, threads or None for all, whether it waits)."""
    if x.op not in ("bar.sync", "barrier.sync", "barrier.sync.aligned", "bar.arrive", "barrier.cta.sync"):
        raise NotModelled(x.op)
    number, *counts = map(constant, x.operands)
    count = counts[0] if counts else None
    waits = "sync" in x.parts
    return lambda block, lanes: (number, count, waits)


@instruction("bar.warp.sync", kind="warp barrier")
def warp_barrier(x: Instruction) -> Any:
    if x.operands not in ([Immediate(-1)], [Immediate(0xFFFFFFFF)]):
        raise NotModelled(x.text)

    return lambda block, lanes: block.order.meet_in_warps(lanes)


@instruction("fence", "membar")
def fence(x: Instruction) -> Any:
    """Fences: order between threads is that of barriers here, so only the asynchronous proxy's
    fence has an effect."""
    if x.op.startswith("fence.proxy.async"):
        return lambda block, lanes: block.order.fence_proxy(lanes)
    if x.parts[1] == "proxy":
        raise NotModelled(x.op)
    return lambda block, lanes: None


@instruction("griddepcontrol.wait")
def wait_on_dependent_grids(x: Instruction) -> Any:
    """The wait for the end of the kernel enqueued before, beside which this one may begin."""
    return lambda block, lanes: block.memory.waited.update(block.thread_number[lanes.at].tolist())


@instruction("setmaxnreg", "nanosleep", "griddepcontrol.launch_dependents")
def nothing(x: Instruction) -> Any:
    """Instructions without effect on values and order."""
    return lambda block, lanes: None
