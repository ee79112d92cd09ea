"""A thread block that executes a kernel."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.counts import Counts
from ptx.decode import Decoded, Kernel
from ptx.faults import Fault, NotModelled
from ptx.global_memory import GlobalMemory
from ptx.lanes import WARP, Lanes
from ptx.mbarriers import MBarriers
from ptx.operands import PARAM_BASE, RAW
from ptx.order import Order
from ptx.schedule import Schedule
from ptx.shared_memory import FIRST, POISON, SharedMemory

AXES = "xyz"


@dataclass
class Launch:
    """Data shared by all blocks of a launch.

    params: the parameters' bytes. tensor_maps: tensor maps of TMA loads, by offset in params.
    strict: raise a fault also for what PTX's manual forbids although compilers emit it: products of
    data copied by cp.async without a fence.proxy.async, and writes of registers that a product
    reads or, after its wgmma.fence, will read.
    """

    kernel: Kernel
    params: bytes
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    memory: GlobalMemory
    tensor_maps: dict[int, Any] = field(default_factory=dict)
    counts: Counts | None = None
    strict: bool = True
    first: tuple[int, ...] = ()  # warpgroups in the order in which they run as far as they can; () to run them together

    def run(self) -> None:
        """Run all blocks, one after the other."""
        if self.threads % WARP:
            raise NotModelled(f"blocks of {self.threads} threads")
        for z in range(self.grid[2]):
            for y in range(self.grid[1]):
                for x in range(self.grid[0]):
                    Block(self, (x, y, z)).run()


class Block:
    """A thread block: its threads, their registers and shared memory."""

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        kernel, threads = launch.kernel, launch.threads
        self.launch, self.kernel, self.index, self.threads = launch, kernel, index, threads
        self.memory, self.counts = launch.memory, launch.counts
        self.order = Order(threads)
        self.shared = SharedMemory(launch.shared_bytes, self.order, kernel.shared_cell, launch.strict, launch.counts)
        self.mbarriers = MBarriers(self.order, self.shared)
        self.registers: list[np.ndarray | None] = [None] * len(kernel.program.registers)
        # By register: mask [threads] of those whose register an asynchronous product writes
        # (in_flight) or reads (in_use).
        self.in_flight: dict[int, np.ndarray] = {}
        self.in_use: dict[int, np.ndarray] = {}
        # By register that products use: mask [threads] of those that wrote it after their last
        # wgmma.fence.
        self.unfenced = {slot: np.ones(threads, bool) for slot in kernel.product_slots}
        self.copies: Any = None  # state of cp.async, made by the first such instruction
        self.reductions: list[Any] = []  # cp.reduce.async.bulk, not waited for
        self.products: Any = None  # state of wgmma
        self.failed_test: dict[int, np.ndarray] = {}  # by wait for an mbarrier: mask of threads whose last test failed
        g = launch.grid
        number = (index[2] * g[1] + index[1]) * g[0] + index[0]
        self.thread_number = number * threads + np.arange(threads, dtype=np.int64) + 1  # index in the launch, from 1 on
        lane = np.arange(threads, dtype=np.uint32)
        self.names: dict[str, np.ndarray] = {
            "%tid.x": lane, "%laneid": lane % WARP, "%warpid": lane // WARP, "%ntid.x": _one(threads),
            "%tid.y": _one(0), "%tid.z": _one(0), "%ntid.y": _one(1), "%ntid.z": _one(1),
        }  # fmt: skip
        for axis, at, size in zip(AXES, index, g, strict=True):
            self.names |= {f"%ctaid.{axis}": _one(at), f"%nctaid.{axis}": _one(size)}
        self.names |= {name: _one(FIRST) for name in kernel.program.dynamic_shared}
        self.names |= {name: _one(PARAM_BASE + at) for name, at in kernel.param_at.items()}
        self.now: Decoded | None = None

    def get(self, slot: int, lanes: Lanes) -> np.ndarray:
        x = self.registers[slot]
        if x is None:
            register = self.kernel.program.registers[slot]
            if self.kernel.demanded[slot]:
                raise Fault(f"{register.name} is read and was never written")
            x = _without_value(self.threads, RAW[register.bits])
        if self.in_flight and slot in self.in_flight and self.in_flight[slot][lanes.at].any():
            raise Fault("the result of an asynchronous product is used before it was waited for")
        if self.launch.strict and slot in self.in_use and self.in_use[slot][lanes.at].any():
            raise Fault("a register is read that an asynchronous product still reads")
        return x[lanes.at]

    def put(self, slot: int, x: np.ndarray, lanes: Lanes) -> None:
        if self.in_flight and slot in self.in_flight and self.in_flight[slot][lanes.at].any():
            raise Fault("the result of an asynchronous product is overwritten before it was waited for")
        if self.in_use and slot in self.in_use and self.in_use[slot][lanes.at].any():
            raise Fault("a register is overwritten that an asynchronous product still reads")
        if slot in self.unfenced:
            self.unfenced[slot][lanes.at] = True
        if lanes.full:
            self.registers[slot] = x if len(x) == self.threads else np.repeat(x, self.threads)
            return
        old = self.registers[slot]
        new = _without_value(self.threads, x.dtype) if old is None else old.copy()
        new[lanes.at] = x
        self.registers[slot] = new

    def named(self, name: str, lanes: Lanes) -> np.ndarray:
        if name not in self.names:
            raise NotModelled(name)
        x = self.names[name]
        return x if len(x) == 1 else x[lanes.at]

    def run(self) -> None:
        """Run until all threads have ended."""
        try:
            with np.errstate(all="ignore"):
                Schedule(self).run()
            self._check_nothing_is_pending()
        except (Fault, NotModelled) as error:
            where = f"{self.kernel.program.name}, block {self.index}"
            at = f"line {self.now.line}: {self.now.text}" if self.now else "its end"
            raise type(error)(f"{error} ({where}, {at})") from None

    def _check_nothing_is_pending(self) -> None:
        if self.copies is not None and self.copies.pending():
            raise Fault("a block ends with asynchronous copies under way")
        if self.reductions:
            raise Fault("a block ends with reductions that still read shared memory")
        if any(barrier.copies for barrier in self.mbarriers.at.values()):
            raise Fault("a block ends with copies to shared memory under way")


def _one(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def _without_value(n: int, dtype: Any) -> np.ndarray:
    """Return what a register holds in threads that did not write it: NaN, or false."""
    if np.dtype(dtype) == np.bool_:
        return np.zeros(n, bool)
    return np.full(n * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype)
