"""The order of accesses that synchronisation guarantees, as vector clocks.

Each warp counts its synchronisations, and an access carries its warp's count. Columns of the tables
are agents: the warps, then the mbarriers, whose count is that of completed phases. A thread may
touch what another agent touched at count c once it has seen count c or a later one of that agent.
"""

import numpy as np

from ptx.lanes import WARP, Lanes


class Order:
    """Vector clocks of a block's threads.

    Attributes:
        clock: [warps], the count of accesses made now.
        seen: [threads, agents], the thread comes after the agent's accesses up to this count.
        fenced: [threads, agents], the same for ordinary writes as asynchronous units see them.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.warps = threads, threads // WARP
        self.clock = np.ones(self.warps, np.int64)
        self.seen = np.zeros((threads, self.warps), np.int64)
        self.fenced = np.zeros((threads, self.warps), np.int64)
        # count up to which asynchronous units see the thread's own writes
        self.own_fenced = np.zeros(threads, np.int64)

    def add_agent(self) -> int:
        """Add a column for an mbarrier; return its index."""
        more = np.zeros((self.threads, 1), np.int64)
        self.seen = np.concatenate([self.seen, more], 1)
        self.fenced = np.concatenate([self.fenced, more], 1)
        return self.seen.shape[1] - 1

    def _meet(self, at: slice | np.ndarray, warps: np.ndarray) -> None:
        """Join the clocks of threads that form whole warps: each has seen what any of them has seen
        or done."""
        seen, fenced = self.seen[at].max(0), self.fenced[at].max(0)
        seen[warps] = self.clock[warps]
        own = self.own_fenced[at].reshape(len(warps), WARP).min(1)
        fenced[warps] = np.maximum(fenced[warps], own)
        self.seen[at], self.fenced[at] = seen, fenced

    def meet(self, lanes: Lanes) -> None:
        """Synchronise whole warps at a barrier of the block."""
        self._meet(lanes.at, lanes.warps)
        self.clock[lanes.warps] += 1

    def meet_in_warps(self, lanes: Lanes) -> None:
        """Synchronise the threads of each warp."""
        for warp in lanes.warps:
            self._meet(slice(warp * WARP, warp * WARP + WARP), np.array([warp]))
        self.clock[lanes.warps] += 1

    def fence_proxy(self, lanes: Lanes) -> None:
        """fence.proxy.async: make all that these threads wrote or have seen visible to asynchronous
        units they start later."""
        self.fenced[lanes.at] = np.maximum(self.fenced[lanes.at], self.seen[lanes.at])
        self.own_fenced[lanes.at] = self.clock[lanes.warp]
        self.clock[lanes.warps] += 1

    def released_by(self, thread: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what a thread sees that waits for this thread's arrival: the entries of seen and
        fenced."""
        seen, fenced, warp = self.seen[thread].copy(), self.fenced[thread].copy(), thread // WARP
        # Only the warp's accesses up to its last synchronisation: later ones of its other threads
        # may come after the arrival.
        self.clock[warp] += 1
        return seen, fenced

    def acquire(self, thread: int, seen: np.ndarray, fenced: np.ndarray) -> None:
        """Join what another thread released into a thread's clock."""
        n = len(seen)
        self.seen[thread, :n] = np.maximum(self.seen[thread, :n], seen)
        self.fenced[thread, :n] = np.maximum(self.fenced[thread, :n], fenced)
