"""Which thread has seen which accesses: clocks that barriers pass on.

Each warp counts its synchronisations; an access carries its warp's count. Columns of the tables are
agents: the warps, then each mbarrier (whose count is the phases it has completed). A thread may
touch what another agent touched at count c once it has seen that agent at c or later.
"""

import numpy as np

from ptx.lanes import WARP, Lanes


class Order:
    """
    Attributes:
        clock: [warps] of accesses that happen now.
        seen: [threads, agents] accesses up to this count came before.
        fenced: [threads, agents] of them, ordinary writes that asynchronous units see, too.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.warps = threads, threads // WARP
        self.clock = np.ones(self.warps, np.int64)
        self.seen = np.zeros((threads, self.warps), np.int64)
        self.fenced = np.zeros((threads, self.warps), np.int64)
        self.own_fenced = np.zeros(threads, np.int64)  # up to which count a thread's own writes are

    def add_agent(self) -> int:
        """A new column."""
        more = np.zeros((self.threads, 1), np.int64)
        self.seen = np.concatenate([self.seen, more], 1)
        self.fenced = np.concatenate([self.fenced, more], 1)
        return self.seen.shape[1] - 1

    def _meet(self, at: slice | np.ndarray, warps: np.ndarray) -> None:
        """Threads that make up whole warps have seen all that any of them has, and has done."""
        seen, fenced = self.seen[at].max(0), self.fenced[at].max(0)
        seen[warps] = self.clock[warps]
        own = self.own_fenced[at].reshape(len(warps), WARP).min(1)
        fenced[warps] = np.maximum(fenced[warps], own)
        self.seen[at], self.fenced[at] = seen, fenced

    def meet(self, lanes: Lanes) -> None:
        """Whole warps meet at a barrier of the block."""
        self._meet(lanes.at, lanes.warps)
        self.clock[lanes.warps] += 1

    def meet_in_warps(self, lanes: Lanes) -> None:
        """The threads of each warp meet."""
        for warp in lanes.warps:
            self._meet(slice(warp * WARP, warp * WARP + WARP), np.array([warp]))
        self.clock[lanes.warps] += 1

    def fence_proxy(self, lanes: Lanes) -> None:
        """fence.proxy.async: what these threads wrote or have seen, asynchronous units see from
        here on."""
        self.fenced[lanes.at] = np.maximum(self.fenced[lanes.at], self.seen[lanes.at])
        self.own_fenced[lanes.at] = self.clock[lanes.warp]
        self.clock[lanes.warps] += 1

    def released_by(self, thread: int) -> tuple[np.ndarray, np.ndarray]:
        """What whoever sees this thread's arrival has seen."""
        seen, fenced, warp = self.seen[thread].copy(), self.fenced[thread].copy(), thread // WARP
        # Of its warp only what a synchronisation put before: other threads' latest may be later.
        self.clock[warp] += 1
        return seen, fenced

    def acquire(self, thread: int, seen: np.ndarray, fenced: np.ndarray) -> None:
        """A thread has seen what another released."""
        n = len(seen)
        self.seen[thread, :n] = np.maximum(self.seen[thread, :n], seen)
        self.fenced[thread, :n] = np.maximum(self.fenced[thread, :n], fenced)
