"""Global memory: memory of this process, limited to the tensors given to a launch."""

import ctypes

import numpy as np
import torch

from ptx.faults import Fault, NotModelled

CELL = 2  # bytes that share one entry in the tables of accesses
ATOMIC = -1  # in place of a thread's index


class Span:
    """A range of bytes that a launch may access."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.base))
        # index in the launch, from 1 on, of the last thread that wrote
        self.writer = np.zeros(-(-self.size // CELL), np.int64)


class GlobalMemory:
    """Global memory of a launch. Before the launch ends, no other thread may access what a thread
    wrote.

    Attributes:
        before: the memory of the launch before, where this one may begin before that one has ended:
            no thread may access what it wrote without having waited (griddepcontrol.wait).
        waited: the threads that have waited, by their indices in the launch, and 0: reads of TMA,
            for which the thread that issued them is checked.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.before: GlobalMemory | None = None
        self.waited: set[int] = {0}

    def add(self, tensor: torch.Tensor) -> None:
        """Allow access to a tensor, which the caller must keep alive: to its elements alone if it
        is contiguous, since it may be part of a workspace, else to all of its storage."""
        if tensor.is_contiguous():
            self.add_bytes(tensor.data_ptr(), tensor.nbytes)
            return
        storage = tensor.untyped_storage()
        self.add_bytes(storage.data_ptr(), storage.nbytes())

    def add_bytes(self, base: int, size: int) -> None:
        """Allow access to a range of bytes; overlapping spans are merged."""
        if not size:
            return
        end = base + size
        for span in [x for x in self.spans if x.base <= end and base <= x.base + x.size]:
            base, end = min(base, span.base), max(end, span.base + span.size)
            self.spans.remove(span)
        self.spans.append(Span(base, end - base))
        self.spans.sort(key=lambda x: x.base)
        self.bases = np.array([x.base for x in self.spans], np.uint64)

    def check_waited(self, address: np.ndarray, width: int, thread: np.ndarray) -> None:
        """Raise a fault for accesses to what the launch before wrote, by threads that have not
        waited. thread: indices in the launch, from 1 on."""
        if self.before is None or self.waited.issuperset(thread.tolist()):
            return
        early = address[~np.isin(thread, list(self.waited))].astype(np.int64)
        for span in self.before.spans:
            offset = early[(early >= span.base) & (early + width <= span.base + span.size)] - span.base
            if span.writer[offset[:, None] // CELL + np.arange(-(-width // CELL))].any():
                raise Fault("race: global memory of the kernel before is accessed without griddepcontrol.wait")

    def _located(self, address: np.ndarray, width: int) -> list[tuple[np.ndarray, Span, np.ndarray]]:
        """Return [(indices into address, span, offsets in the span)]."""
        if (address % np.uint64(width)).any():
            raise Fault(f"{width} bytes of global memory at an address that is not a multiple of it")
        which = np.searchsorted(self.bases, address, "right") - 1
        found = []
        for n in np.unique(which):
            span, entries = self.spans[max(n, 0)], np.nonzero(which == n)[0]
            offset = address[entries].astype(np.int64) - span.base
            if offset.min() < 0 or offset.max() + width > span.size:
                raise Fault(f"global memory: {offset.min()}..{offset.max()} + {width} of {span.size} bytes")
            found.append((entries, span, offset))
        return found

    def read(self, address: np.ndarray, width: int, thread: np.ndarray) -> np.ndarray:
        """Read [n, width] bytes; thread: indices in the launch, from 1 on."""
        self.check_waited(address, width, thread)
        data = np.empty((len(address), width), np.uint8)
        for entries, span, offset in self._located(address, width):
            writer = span.writer[offset[:, None] // CELL + np.arange(-(-width // CELL))]
            if ((writer != 0) & (writer != thread[entries, None])).any():
                raise Fault("race: global memory is read that another thread of the launch wrote")
            data[entries] = span.bytes[offset[:, None] + np.arange(width)]
        return data

    def write(self, address: np.ndarray, data: np.ndarray, thread: np.ndarray) -> None:
        width = data.shape[1]
        if width % CELL:
            raise NotModelled(f"{width} bytes are written to global memory")
        self.check_waited(address, width, thread)
        for entries, span, offset in self._located(address, width):
            cells, places = offset[:, None] // CELL + np.arange(width // CELL), offset[:, None] + np.arange(width)
            new = data[entries]
            others = (span.writer[cells] != 0) & (span.writer[cells] != thread[entries, None])
            if others.any() and (span.bytes[places] != new)[others.any(1)].any():
                raise Fault("race: two threads of a launch write different values to one global address")
            span.bytes[places] = new
            span.writer[cells] = thread[entries, None]
            if (span.bytes[places] != new).any():
                raise Fault("race: two threads write different values to one global address at once")

    def add_float32(self, address: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Add atomically, one thread after the other; return the values before all additions."""
        before = np.empty(len(address), np.float32)
        for entries, span, offset in self._located(address, 4):
            cells = offset[:, None] // CELL + np.arange(2)
            if (span.writer[cells] > 0).any():
                raise Fault("race: an atomic addition to what a thread of the launch wrote")
            span.writer[cells] = ATOMIC
            values = span.bytes[: span.size // 4 * 4].view(np.float32)
            before[entries] = values[offset // 4]
            np.add.at(values, offset // 4, x[entries])
        return before
