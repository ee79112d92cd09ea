"""mbarriers: arrivals, expected bytes, phases, and the accesses that each phase makes visible."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptx.faults import Fault
from ptx.order import Order
from ptx.shared_memory import SharedMemory


@dataclass
class MBarrier:
    count: int  # arrivals that complete a phase
    agent: int
    pending: int = 0
    bytes_to_come: int = 0
    phase: int = 0  # number of completed phases
    # (bytes, function that completes the copy)
    copies: list[tuple[int, Callable[[int], None]]] = field(default_factory=list)
    # accesses seen by the threads that arrived in this phase
    arrived: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    done: tuple[np.ndarray, np.ndarray] | None = None  # the same for all completed phases


class MBarriers:
    def __init__(self, order: Order, shared: SharedMemory) -> None:
        self.order, self.shared = order, shared
        self.at: dict[int, MBarrier] = {}
        self.changes = 0

    def make(self, address: int, count: int, thread: int) -> None:
        if address in self.at:
            raise Fault("an mbarrier is made where one is")
        self.shared.reserve(address, thread)
        self.at[address] = MBarrier(count, self.order.add_agent(), pending=count)

    def get(self, address: int, thread: int) -> MBarrier:
        if address not in self.at:
            raise Fault("there is no mbarrier at this address")
        self.shared.used_by(address, thread)
        return self.at[address]

    def give_up(self, address: int, thread: int) -> None:
        barrier = self.get(address, thread)
        if barrier.copies:
            raise Fault("an mbarrier is given up with copies under way")
        self.shared.release(address)
        del self.at[address]

    def arrive(self, address: int, thread: int, more_bytes: int = 0) -> None:
        barrier = self.get(address, thread)
        barrier.bytes_to_come += more_bytes
        barrier.pending -= 1
        if barrier.pending < 0:
            raise Fault("more threads arrive at an mbarrier than it was made for")
        barrier.arrived.append(self.order.released_by(thread))
        self._settle(barrier)

    def completed(self, address: int, parity: int, thread: int) -> bool:
        """Whether the phase with this parity has completed; if so, the thread sees all accesses
        before it.

        Pending copies complete here, which is as late as possible.
        """
        barrier = self.get(address, thread)
        landed, barrier.copies = barrier.copies, []
        for size, land in landed:
            barrier.bytes_to_come -= size
            land(barrier.phase + 1)
        if landed:
            self._settle(barrier)
        if barrier.phase % 2 == parity % 2:
            return False
        if barrier.done is not None:  # None for a new mbarrier, whose preceding phase counts as completed
            self.order.acquire(thread, *barrier.done)
        return True

    def _settle(self, barrier: MBarrier) -> None:
        self.changes += 1
        if barrier.pending or barrier.bytes_to_come or barrier.copies:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        size = self.order.seen.shape[1]
        seen, fenced = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for pair in [*barrier.arrived, *([barrier.done] if barrier.done else [])]:
            for total, x in zip((seen, fenced), pair, strict=True):
                total[: len(x)] = np.maximum(total[: len(x)], x)
        seen[barrier.agent] = barrier.phase
        barrier.done, barrier.arrived = (seen, fenced), []
