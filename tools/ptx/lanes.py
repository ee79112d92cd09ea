"""Sets of threads of a block that execute an instruction together."""

import functools

import numpy as np

WARP = 32
GROUP = 4 * WARP  # threads of a warpgroup


class Lanes:
    """Threads of a block.

    Attributes:
        ids: thread indices, ascending. n: number of threads.
        at: index that selects their entries in an array over the block's threads.
        warp: warp of each thread. warps: warps with a thread in the set. whole: whether all of
            these have all their threads in it. whole_groups: the same of warpgroups.
    """

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.ids = np.nonzero(mask)[0]
        self.n = len(self.ids)
        self.full = self.n == len(mask)
        self.at: slice | np.ndarray = slice(None) if self.full else self.ids
        self.warp = self.ids // WARP
        self.warps = np.unique(self.warp)
        self.whole = self.n == WARP * len(self.warps)
        self.whole_groups = self.n == GROUP * len(np.unique(self.ids // GROUP))


@functools.lru_cache(4096)
def _lanes(mask: bytes) -> Lanes:
    return Lanes(np.frombuffer(mask, bool))


def lanes_of(mask: np.ndarray) -> Lanes:
    """Return the set of threads where mask [threads] is true."""
    return _lanes(mask.tobytes())
