"""A block of threads running a kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.counts import Counts
from ptx.decode import Decoded, Kernel
from ptx.faults import Fault, NotModelled
from ptx.global_memory import GlobalMemory
from ptx.lanes import WARP, Lanes, lanes_of
from ptx.mbarriers import MBarriers
from ptx.operands import PARAM_BASE
from ptx.order import Order
from ptx.shared_memory import POISON, SharedMemory

STEPS = 20_000_000
AXES = "xyz"


@dataclass
class Launch:
    """What all blocks of a launch share.

    params: their bytes; tensor_maps: by offset in them, what the copy engine is told.
    """

    kernel: Kernel
    params: bytes
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    memory: GlobalMemory
    tensor_maps: dict[int, Any] = field(default_factory=dict)
    counts: Counts | None = None
    copies_need_fence: bool = True  # see SharedMemory

    def run(self) -> None:
        """Every block, one after the other."""
        if self.threads % WARP:
            raise NotModelled(f"blocks of {self.threads} threads")
        for z in range(self.grid[2]):
            for y in range(self.grid[1]):
                for x in range(self.grid[0]):
                    Block(self, (x, y, z)).run()


class Block:
    """Threads, their registers and shared memory. Those at the lowest instruction go first."""

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        kernel, threads = launch.kernel, launch.threads
        self.launch, self.kernel, self.index, self.threads = launch, kernel, index, threads
        self.memory, self.counts = launch.memory, launch.counts
        self.order = Order(threads)
        self.shared = SharedMemory(launch.shared_bytes, self.order, kernel.shared_cell, launch.copies_need_fence)
        self.mbarriers = MBarriers(self.order, self.shared)
        self.registers: list[np.ndarray | None] = [None] * len(kernel.program.registers)
        # Of registers that asynchronous products write (True) or read: threads [threads] of each.
        self.in_flight: dict[int, np.ndarray] = {}
        self.lent: dict[int, np.ndarray] = {}
        # Of registers that products use: threads that wrote them after their last wgmma.fence.
        self.unfenced = {slot: np.ones(threads, bool) for slot in kernel.product_slots}
        self.copies: Any = None  # cp.async, made by their first instruction
        self.products: Any = None  # wgmma
        self.refused: dict[int, np.ndarray] = {}  # by wait for an mbarrier: threads it has said no to
        g = launch.grid
        number = (index[2] * g[1] + index[1]) * g[0] + index[0]
        self.thread_number = number * threads + np.arange(threads, dtype=np.int64) + 1  # in the launch
        lane = np.arange(threads, dtype=np.uint32)
        self.names: dict[str, np.ndarray] = {
            "%tid.x": lane, "%laneid": lane % WARP, "%warpid": lane // WARP, "%ntid.x": _one(threads),
            "%tid.y": _one(0), "%tid.z": _one(0), "%ntid.y": _one(1), "%ntid.z": _one(1),
        }  # fmt: skip
        for axis, at, size in zip(AXES, index, g, strict=True):
            self.names |= {f"%ctaid.{axis}": _one(at), f"%nctaid.{axis}": _one(size)}
        self.names |= {name: _one(0) for name in kernel.program.dynamic_shared}
        self.names |= {name: _one(PARAM_BASE + at) for name, at in kernel.param_at.items()}
        self.now: Decoded | None = None

    # --- registers

    def get(self, slot: int, lanes: Lanes) -> np.ndarray:
        x = self.registers[slot]
        if x is None:
            raise Fault(f"{self.kernel.program.registers[slot].name} is read and was never written")
        if self.in_flight and slot in self.in_flight and self.in_flight[slot][lanes.at].any():
            raise Fault("the result of an asynchronous product is used before it was waited for")
        return x[lanes.at]

    def put(self, slot: int, x: np.ndarray, lanes: Lanes) -> None:
        if self.in_flight and slot in self.in_flight and self.in_flight[slot][lanes.at].any():
            raise Fault("the result of an asynchronous product is overwritten before it was waited for")
        if self.lent and slot in self.lent and self.lent[slot][lanes.at].any():
            raise Fault("a register is overwritten that an asynchronous product still reads")
        if slot in self.unfenced:
            self.unfenced[slot][lanes.at] = True
        if lanes.full:
            self.registers[slot] = x if len(x) == self.threads else np.repeat(x, self.threads)
            return
        old = self.registers[slot]
        if old is None:
            # Predicates that only some threads wrote are false elsewhere.
            new = np.zeros(self.threads, x.dtype) if x.dtype == bool else _poison(self.threads, x.dtype)
        else:
            new = old.copy()
        new[lanes.at] = x
        self.registers[slot] = new

    def named(self, name: str, lanes: Lanes) -> np.ndarray:
        if name not in self.names:
            raise NotModelled(name)
        x = self.names[name]
        return x if len(x) == 1 else x[lanes.at]

    # --- schedule

    def run(self) -> None:
        """To the end of all threads."""
        try:
            with np.errstate(all="ignore"):
                self._run()
        except (Fault, NotModelled) as error:
            where = f"{self.kernel.program.name}, block {self.index}"
            at = f"line {self.now.line}: {self.now.text}" if self.now else "its end"
            raise type(error)(f"{error} ({where}, {at})") from None

    def _run(self) -> None:
        code, end = self.kernel.code, len(self.kernel.code)
        ready: dict[int, np.ndarray] = {0: np.ones(self.threads, bool)}
        waiting: dict[int, _Waiting] = {}  # at barriers of the block, by number
        parked: dict[int, np.ndarray] = {}  # at mbarriers
        changes, steps = self.mbarriers.changes, 0
        ended = np.zeros(self.threads, bool)

        def add(pc: int, mask: np.ndarray) -> None:
            ready[pc] = ready[pc] | mask if pc in ready else mask

        while ready or parked or waiting:
            if not ready:
                if not parked or self.mbarriers.changes == changes:
                    raise Fault(_stuck(bool(parked), bool(waiting), bool(ended.any())))
                changes = self.mbarriers.changes
                ready, parked = parked, {}
                continue
            pc = min(ready)
            mask = ready.pop(pc)
            lanes = lanes_of(mask)
            while True:
                if pc == end:
                    ended |= mask
                    break
                if pc in ready:
                    add(pc, mask)
                    break
                if ready and pc > min(ready):
                    add(pc, mask)
                    break
                self.now = now = code[pc]
                steps += 1
                if steps > STEPS:
                    raise Fault("no end is in sight")
                if self.counts is not None:
                    self.counts.issued(pc, len(lanes.warps))
                active, rest = lanes, None
                if now.guard is not None:
                    on = now.guard(self, lanes)
                    if not on.all():
                        chosen = np.zeros(self.threads, bool)
                        chosen[lanes.at] = on
                        active, rest = lanes_of(chosen), mask & ~chosen
                if not active.n:
                    pc += 1
                elif now.kind == "plain":
                    now.run(self, active)
                    pc += 1
                elif now.kind == "branch":
                    if active is lanes:
                        pc = now.target
                    else:
                        add(now.target, active.mask)
                        add(pc + 1, rest)
                        break
                elif now.kind == "exit":
                    ended |= active.mask
                    if active is lanes:
                        break
                    mask, lanes, pc = rest, lanes_of(rest), pc + 1
                elif now.kind == "wait":
                    done = np.zeros(self.threads, bool)
                    done[active.at] = now.run(self, active)
                    if not done[active.at].all():
                        parked[pc] = parked.get(pc, False) | (active.mask & ~done)
                        go = mask & (~active.mask | done)
                        if go.any():
                            add(pc + 1, go)
                        break
                    pc += 1
                elif now.kind == "barrier":
                    number, count, waits = now.run(self, active)
                    if not active.whole:
                        raise Fault("part of a warp arrives at a barrier")
                    at = waiting.setdefault(number, _Waiting(count or self.threads, np.zeros(self.threads, bool)))
                    at.arrive(pc + 1, active, waits, count or self.threads)
                    if rest is not None and rest.any():
                        add(pc + 1, rest)
                    if not waits:
                        add(pc + 1, active.mask)
                    if at.arrived.sum() == at.count:
                        self.order.meet(lanes_of(at.arrived))
                        for resume, who in at.resume.items():
                            add(resume, who)
                        del waiting[number]
                    break
        if self.copies is not None and self.copies.under_way():
            raise Fault("a block ends with asynchronous copies under way")
        if any(barrier.copies for barrier in self.mbarriers.at.values()):
            raise Fault("a block ends with copies to shared memory under way")


@dataclass
class _Waiting:
    """Threads at a barrier."""

    count: int
    arrived: np.ndarray
    resume: dict[int, np.ndarray] = field(default_factory=dict)

    def arrive(self, pc: int, lanes: Lanes, waits: bool, count: int) -> None:
        if count != self.count:
            raise Fault(f"a barrier is for {self.count} threads and for {count}")
        if self.arrived[lanes.at].any():
            raise Fault("a thread arrives twice at a barrier")
        self.arrived = self.arrived | lanes.mask
        if waits:
            self.resume[pc] = self.resume.get(pc, False) | lanes.mask


def _stuck(parked: bool, waiting: bool, ended: bool) -> str:
    if parked:
        return "threads wait for ever at an mbarrier"
    assert waiting
    return "threads wait at a barrier that others " + ("have ended before" if ended else "do not reach")


def _one(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def _poison(n: int, dtype: Any) -> np.ndarray:
    return np.full(n * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)
