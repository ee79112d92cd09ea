"""A block's shared memory: bytes, and for each few of them who touched them last and when.

What nobody wrote reads as NaN.
"""

import numpy as np

from ptx.counts import Counts
from ptx.faults import Fault
from ptx.lanes import WARP
from ptx.order import Order

NOBODY, COLLECTIVE, UNIT = -1, -2, -3  # instead of a thread: none yet, a whole warp, an asynchronous unit
POISON = 0xFF  # a NaN in every type
FIRST = 1024  # its first address, as from sm_90 on, where the system has the bytes before


class SharedMemory:
    """
    cell: bytes that are watched together; no access is of less. copies_need_fence: whether products
    see what cp.async wrote only after a fence.proxy.async, as the memory model has it. counts: of
    the launch, if any.
    """

    def __init__(
        self, size: int, order: Order, cell: int, copies_need_fence: bool = True, counts: Counts | None = None
    ) -> None:
        cells = -(-(FIRST + size) // cell)
        self.end, self.order, self.cell, self.counts = FIRST + size, order, cell, counts
        self.bytes = np.full(cells * cell, POISON, np.uint8)
        self.writer = np.full(cells, NOBODY, np.int32)
        self.write_agent = np.zeros(cells, np.int32)
        self.write_clock = np.zeros(cells, np.int64)
        self.reader = np.full((cells, order.warps), NOBODY, np.int32)
        self.read_clock = np.zeros((cells, order.warps), np.int64)
        self.landing = np.zeros(cells, bool)  # an asynchronous copy writes it
        self.lent = np.zeros(cells, np.int32)  # asynchronous products that read it
        self.copies_need_fence = copies_need_fence
        self.copied = np.zeros(cells, bool)  # last written by cp.async
        self.reserved = np.zeros(cells, bool)  # an mbarrier lies there

    def cells(self, address: np.ndarray, width: int) -> np.ndarray:
        """[n, cells of an access]: of `width` bytes at each address [n]."""
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
        """The last writes come before what threads ids [n] do now. own: a thread's own do."""
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
        if self.lent[cells].any():
            raise Fault("shared memory is written that asynchronous products still read")

    def read(self, address: np.ndarray, width: int, ids: np.ndarray, collective: bool = False) -> np.ndarray:
        """[n, width] bytes. collective: what one thread's address names goes to all of its warp."""
        if self.counts is not None:
            self.counts.shared_access(address, width, ids // WARP)
        cells = self.cells(address, width)
        self._free(cells)
        self._after_write(cells, ids, own=not collective)
        warp = (ids // WARP)[:, None]
        self.read_clock[cells, warp] = self.order.clock[warp]
        self.reader[cells, warp] = COLLECTIVE if collective else ids[:, None]
        if not collective:  # one of several readers is not enough to be remembered
            several = self.reader[cells, warp] != ids[:, None]
            if several.any():
                self.reader[cells[several], np.broadcast_to(warp, cells.shape)[several]] = COLLECTIVE
        data: np.ndarray = self.bytes[address[:, None] + np.arange(width)]
        return data

    def write(self, address: np.ndarray, data: np.ndarray, ids: np.ndarray, collective: bool = False) -> None:
        """data [n, width] bytes, by threads ids [n]."""
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
        """cp.async: its bytes are nobody's until it has landed."""
        cells = self.cells(address, width)
        self._free(cells)
        self._after_write(cells, ids, own=True)
        self._after_reads(cells, ids)
        self.landing[cells] = True
        self.bytes[address[:, None] + np.arange(width)] = POISON

    def land_copy(self, address: np.ndarray, data: np.ndarray, ids: np.ndarray) -> None:
        """As if the threads wrote it now."""
        cells = self.cells(address, data.shape[1])
        self.landing[cells] = False
        self._put(cells, address, data, ids)
        self.copied[cells] = True

    def _for_units(self, cells: np.ndarray, thread: int) -> None:
        """What was written is there for an asynchronous unit that a thread starts."""
        agent, clock = self.write_agent[cells], self.write_clock[cells]
        by_unit = self.writer[cells] == UNIT
        if not self.copies_need_fence:
            by_unit |= self.copied[cells]
        fenced = self.order.fenced[thread, agent] >= clock
        fenced |= (self.writer[cells] == thread) & (self.order.own_fenced[thread] >= clock)
        known = np.where(by_unit, self.order.seen[thread, agent] >= clock, fenced | (self.writer[cells] == NOBODY))
        if not known.all():
            writer = self.writer[cells][~known][0]
            raise Fault(
                f"an asynchronous unit started by thread {thread} uses what {_who(writer)} wrote: "
                f"no barrier and fence.proxy.async lie between"
            )

    def _cells_at(self, places: np.ndarray, what: str) -> np.ndarray:
        """Cells of the bytes `places` [n] that an asynchronous unit accesses."""
        if places.min() < FIRST or places.max() >= self.end:
            raise Fault(f"{what} {places.min()}..{places.max()}, where shared memory is {FIRST}..{self.end}")
        cells = np.unique(places // self.cell)
        self._free(cells)
        return cells

    def begin_unit_copy(self, places: np.ndarray, thread: int) -> np.ndarray:
        """cp.async.bulk to bytes `places` [n], started by a thread; returns its cells."""
        cells = self._cells_at(places, "a copy to")
        self._for_units(cells, thread)
        ids = np.full(len(cells), thread)
        self._after_reads(cells[:, None], ids)
        self.landing[cells] = True
        self.bytes[places] = POISON
        return cells

    def land_unit_copy(self, cells: np.ndarray, places: np.ndarray, data: np.ndarray, agent: int, clock: int) -> None:
        """Seen by whoever sees phase `clock` of the mbarrier that is `agent`."""
        self.landing[cells] = False
        self.bytes[places] = data
        self.writer[cells] = UNIT
        self.write_agent[cells], self.write_clock[cells] = agent, clock

    def lend(self, places: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Bytes `places` that an asynchronous product of some threads' warps reads; its cells."""
        cells = self._cells_at(places, "a product reads")
        for thread in threads:
            self._for_units(cells, int(thread))
        self.lent[cells] += 1
        return cells

    def take_back(self, cells: np.ndarray, warps: np.ndarray) -> None:
        """The product has ended: its warps have read."""
        self.lent[cells] -= 1
        self.read_clock[cells[:, None], warps] = self.order.clock[warps]
        self.reader[cells[:, None], warps] = COLLECTIVE

    def reserve(self, address: int, thread: int) -> None:
        """An mbarrier is made of 8 bytes."""
        at, ids = np.array([address]), np.array([thread])
        self._write(at, np.zeros((1, 8), np.uint8), ids, own=True)
        self.reserved[self.cells(at, 8)] = True

    def release(self, address: int) -> None:
        self.reserved[self.cells(np.array([address]), 8)] = False

    def used_by(self, address: int, thread: int) -> None:
        """An mbarrier is used by a thread: its making comes before."""
        cells, ids = self.cells(np.array([address]), 8), np.array([thread])
        self._after_write(cells, ids, own=True)
        warp = thread // WARP
        alone = (self.read_clock[cells, warp] < self.order.clock[warp]) | (self.reader[cells, warp] == thread)
        self.read_clock[cells, warp] = self.order.clock[warp]
        self.reader[cells, warp] = np.where(alone, thread, COLLECTIVE)


def swizzled(at: np.ndarray, row: int) -> np.ndarray:
    """Where a matrix of rows of 16 (not swizzled), 32, 64 or 128 bytes keeps what lies at `at`."""
    return at ^ ((at >> 7 & row // 16 - 1) << 4)


def _who(writer: int) -> str:
    return {NOBODY: "nobody", UNIT: "an asynchronous copy"}.get(int(writer), f"thread {writer}")
