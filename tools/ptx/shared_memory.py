"""Shared memory of a block: its bytes, and for each cell of bytes the last accesses to it.

Bytes that were never written read as NaN.
"""

import numpy as np

from ptx.counts import Counts
from ptx.faults import Fault
from ptx.lanes import WARP
from ptx.order import Order

# In place of a thread's index: never written, a whole warp, an asynchronous unit.
UNWRITTEN, COLLECTIVE, UNIT = -1, -2, -3
POISON = 0xFF  # NaN in every floating-point type
FIRST = 1024  # first address, as from sm_90 on, where the system uses the bytes before it


class SharedMemory:
    """Shared memory with checks for races.

    cell: bytes with one entry in the tables, no more than the narrowest access. copies_need_fence:
    whether products see what cp.async wrote only after a fence.proxy.async, as the memory model
    requires. counts: counts of the launch, or None.
    """

    def __init__(
        self, size: int, order: Order, cell: int, copies_need_fence: bool = True, counts: Counts | None = None
    ) -> None:
        cells = -(-(FIRST + size) // cell)
        self.end, self.order, self.cell, self.counts = FIRST + size, order, cell, counts
        self.bytes = np.full(cells * cell, POISON, np.uint8)
        self.writer = np.full(cells, UNWRITTEN, np.int32)
        self.write_agent = np.zeros(cells, np.int32)
        self.write_clock = np.zeros(cells, np.int64)
        self.reader = np.full((cells, order.warps), UNWRITTEN, np.int32)
        self.read_clock = np.zeros((cells, order.warps), np.int64)
        self.landing = np.zeros(cells, bool)  # an asynchronous copy is writing it
        self.in_use = np.zeros(cells, np.int32)  # number of asynchronous products that read it
        self.copies_need_fence = copies_need_fence
        self.copied = np.zeros(cells, bool)  # last written by cp.async
        self.reserved = np.zeros(cells, bool)  # part of an mbarrier

    def cells(self, address: np.ndarray, width: int) -> np.ndarray:
        """Return the cells [n, cells of an access] of `width` bytes at each address [n]."""
        if (address < FIRST).any() or (address + width > self.end).any():
            raise Fault(
                f"shared memory is {FIRST}..{self.end}; {address.min()}..{address.max()} + {width} are accessed"
            )
        if (address % min(width, 16)).any():
            raise Fault(f"{width} bytes of shared memory at an address that is not a multiple of it")
        cells: np.ndarray = address[:, None] // self.cell + np.arange(width // self.cell)
        return cells

    def _free(self, cells: np.ndarray) -> None:
        if self.reserved[cells].any():
            raise Fault("an mbarrier is accessed as memory")
        if self.landing[cells].any():
            raise Fault("what an asynchronous copy writes is accessed before it was waited for")

    def _after_write(self, cells: np.ndarray, ids: np.ndarray, own: bool) -> None:
        """Check that the last writes are ordered before accesses of threads ids [n]; own: a
        thread's own writes are."""
        known = self.order.seen[ids[:, None], self.write_agent[cells]] >= self.write_clock[cells]
        if own:
            known |= self.writer[cells] == ids[:, None]
        if not known.all():
            at = tuple(x[0] for x in np.nonzero(~known))
            raise Fault(
                f"race: thread {ids[at[0]]} after a write of {_who(self.writer[cells[at]])}, not ordered before"
            )

    def _after_reads(self, cells: np.ndarray, ids: np.ndarray) -> None:
        later = self.read_clock[cells] > self.order.seen[ids][:, None, : self.order.warps]
        if later.any():
            own = np.arange(self.order.warps) == (ids // WARP)[:, None, None]
            later &= ~(own & (self.reader[cells] == ids[:, None, None]))
            if later.any():
                n, _, warp = (int(x[0]) for x in np.nonzero(later))
                raise Fault(f"race: thread {ids[n]} writes what warp {warp} has read, not ordered before")
        if self.in_use[cells].any():
            raise Fault("shared memory is written that asynchronous products still read")

    def read(self, address: np.ndarray, width: int, ids: np.ndarray, collective: bool = False) -> np.ndarray:
        """Read [n, width] bytes; collective: the data of each thread's address goes to all threads
        of its warp."""
        if self.counts is not None:
            self.counts.shared_access(address, width, ids // WARP)
        cells = self.cells(address, width)
        self._free(cells)
        self._after_write(cells, ids, own=not collective)
        warp = (ids // WARP)[:, None]
        self.read_clock[cells, warp] = self.order.clock[warp]
        self.reader[cells, warp] = COLLECTIVE if collective else ids[:, None]
        if not collective:  # if several threads of a warp have read, the warp is recorded as the reader
            several = self.reader[cells, warp] != ids[:, None]
            if several.any():
                self.reader[cells[several], np.broadcast_to(warp, cells.shape)[several]] = COLLECTIVE
        data: np.ndarray = self.bytes[address[:, None] + np.arange(width)]
        return data

    def write(self, address: np.ndarray, data: np.ndarray, ids: np.ndarray, collective: bool = False) -> None:
        """Write data [n, width] bytes as threads ids [n]."""
        if self.counts is not None:
            self.counts.shared_access(address, data.shape[1], ids // WARP)
        self._write(address, data, ids, own=not collective)

    def _write(self, address: np.ndarray, data: np.ndarray, ids: np.ndarray, own: bool) -> None:
        cells = self.cells(address, data.shape[1])
        self._free(cells)
        self._after_write(cells, ids, own)
        self._after_reads(cells, ids)
        self._put(cells, address, data, ids)

    def _put(self, cells: np.ndarray, address: np.ndarray, data: np.ndarray, ids: np.ndarray) -> None:
        places = address[:, None] + np.arange(data.shape[1])
        self.bytes[places] = data
        self.copied[cells] = False
        self.writer[cells] = ids[:, None]
        self.write_agent[cells] = warp = (ids // WARP)[:, None]
        self.write_clock[cells] = self.order.clock[warp]
        if (self.writer[cells] != ids[:, None]).any() and (self.bytes[places] != data).any():
            raise Fault("race: two threads write different values to one address at once")

    def begin_copy(self, address: np.ndarray, width: int, ids: np.ndarray) -> None:
        """Begin a cp.async; its destination may not be accessed until it has completed."""
        cells = self.cells(address, width)
        self._free(cells)
        self._after_write(cells, ids, own=True)
        self._after_reads(cells, ids)
        self.landing[cells] = True
        self.bytes[address[:, None] + np.arange(width)] = POISON

    def land_copy(self, address: np.ndarray, data: np.ndarray, ids: np.ndarray) -> None:
        """Complete a cp.async, as if the threads wrote the data now."""
        cells = self.cells(address, data.shape[1])
        self.landing[cells] = False
        self._put(cells, address, data, ids)
        self.copied[cells] = True

    def _for_units(self, cells: np.ndarray, thread: int) -> None:
        """Check that writes to cells are visible to an asynchronous unit that a thread starts."""
        agent, clock = self.write_agent[cells], self.write_clock[cells]
        by_unit = self.writer[cells] == UNIT
        if not self.copies_need_fence:
            by_unit |= self.copied[cells]
        fenced = self.order.fenced[thread, agent] >= clock
        fenced |= (self.writer[cells] == thread) & (self.order.own_fenced[thread] >= clock)
        known = np.where(by_unit, self.order.seen[thread, agent] >= clock, fenced | (self.writer[cells] == UNWRITTEN))
        if not known.all():
            writer = self.writer[cells][~known][0]
            raise Fault(
                f"an asynchronous unit started by thread {thread} uses what {_who(writer)} wrote: "
                f"no barrier and fence.proxy.async lie between"
            )

    def _cells_at(self, places: np.ndarray, what: str) -> np.ndarray:
        """Return the cells of the bytes `places` [n], which an asynchronous unit accesses."""
        if places.min() < FIRST or places.max() >= self.end:
            raise Fault(f"{what} {places.min()}..{places.max()}, where shared memory is {FIRST}..{self.end}")
        cells = np.unique(places // self.cell)
        self._free(cells)
        return cells

    def begin_unit_copy(self, places: np.ndarray, thread: int) -> np.ndarray:
        """Begin a cp.async.bulk to bytes `places` [n], started by a thread; return its cells."""
        cells = self._cells_at(places, "a copy to")
        self._for_units(cells, thread)
        ids = np.full(len(cells), thread)
        self._after_reads(cells[:, None], ids)
        self.landing[cells] = True
        self.bytes[places] = POISON
        return cells

    def land_unit_copy(self, cells: np.ndarray, places: np.ndarray, data: np.ndarray, agent: int, clock: int) -> None:
        """Complete it; the data is visible to threads that see phase `clock` of the mbarrier
        `agent`."""
        self.landing[cells] = False
        self.bytes[places] = data
        self.writer[cells] = UNIT
        self.write_agent[cells], self.write_clock[cells] = agent, clock

    def lend(self, places: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Mark the bytes `places` as read by an asynchronous product of the threads' warps; return
        their cells."""
        cells = self._cells_at(places, "a product reads")
        for thread in threads:
            self._for_units(cells, int(thread))
        self.in_use[cells] += 1
        return cells

    def take_back(self, cells: np.ndarray, warps: np.ndarray) -> None:
        """Record that a product has ended, as a read by its warps."""
        self.in_use[cells] -= 1
        self.read_clock[cells[:, None], warps] = self.order.clock[warps]
        self.reader[cells[:, None], warps] = COLLECTIVE

    def reserve(self, address: int, thread: int) -> None:
        """Make the 8 bytes at an address an mbarrier."""
        at, ids = np.array([address]), np.array([thread])
        self._write(at, np.zeros((1, 8), np.uint8), ids, own=True)
        self.reserved[self.cells(at, 8)] = True

    def release(self, address: int) -> None:
        self.reserved[self.cells(np.array([address]), 8)] = False

    def used_by(self, address: int, thread: int) -> None:
        """Check that an mbarrier's initialization is ordered before its use by a thread, and record
        the use."""
        cells, ids = self.cells(np.array([address]), 8), np.array([thread])
        self._after_write(cells, ids, own=True)
        warp = thread // WARP
        alone = (self.read_clock[cells, warp] < self.order.clock[warp]) | (self.reader[cells, warp] == thread)
        self.read_clock[cells, warp] = self.order.clock[warp]
        self.reader[cells, warp] = np.where(alone, thread, COLLECTIVE)


def swizzled(at: np.ndarray, row: int) -> np.ndarray:
    """Return the address at which a swizzled matrix, with rows of 16 (no swizzle), 32, 64 or 128
    bytes, stores the byte of address `at`."""
    return at ^ ((at >> 7 & row // 16 - 1) << 4)


def _who(writer: int) -> str:
    return {UNWRITTEN: "no thread", UNIT: "an asynchronous copy"}.get(int(writer), f"thread {writer}")
