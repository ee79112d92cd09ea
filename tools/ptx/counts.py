"""Costs of a launch by instruction: issues, wavefronts of shared memory, sectors of global
memory."""

from collections import Counter

import numpy as np

from ptx.lanes import WARP, Lanes
from ptx.parse import Program

BANKS, BANK = 32, 4
SECTOR = 32
CLASSES = {  # the beginnings of instructions' names
    "exponentials": ("ex2",),
    "barriers": ("bar.sync", "barrier"),
    "waits": ("mbarrier.try_wait", "cp.async.wait", "wgmma.wait_group"),
}


class Counts:
    """Sums over all blocks of a launch; arrays have one entry for each instruction.

    Attributes:
        issues: number of times a warp issued it.
        wavefronts, minimum: 128-byte cycles of shared memory that it took, and the number without
            bank conflicts.
        sectors: 32-byte sectors that it moved from or to global memory.
        tensor_macs: multiply-adds of matrix products. unit_bytes: bytes of shared memory that
            asynchronous units read or wrote.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        size = len(program.code)
        self.issues, self.wavefronts, self.minimum, self.sectors = (np.zeros(size, np.int64) for _ in range(4))
        self.tensor_macs = 0
        self.unit_bytes = 0
        self._pc = 0

    def issued(self, pc: int, lanes: Lanes) -> None:
        self._pc = pc
        self.issues[pc] += len(lanes.warps)

    def shared_access(self, address: np.ndarray, width: int, warp: np.ndarray) -> None:
        """Count a shared-memory access of `width` bytes per thread. The lanes of a warp are served
        in parts of 128 bytes; distinct words of a part in the same bank take one wavefront each."""
        share = max(1, WARP * BANK // max(width, BANK))
        lane_of_warp = np.arange(len(warp)) - np.searchsorted(warp, warp)
        part = warp * WARP + lane_of_warp // share
        words = address[:, None] // BANK + np.arange(max(1, width // BANK))
        keys = np.unique((part[:, None].astype(np.int64) << 32 | words).ravel())
        where = keys >> 32
        _, index = np.unique(where, return_inverse=True)
        load = np.zeros((index.max() + 1, BANKS), np.int64)
        np.add.at(load, (index, (keys & 0xFFFFFFFF) % BANKS), 1)
        self.wavefronts[self._pc] += load.max(1).sum()
        self.minimum[self._pc] += len(load)

    def global_access(self, address: np.ndarray, width: int, warp: np.ndarray) -> None:
        places = address[:, None].astype(np.int64) + np.array([0, width - 1])
        keys = np.unique((warp[:, None].astype(np.int64) << 56 | places // SECTOR).ravel())
        self.sectors[self._pc] += len(keys)

    def product(self, macs: int, unit_bytes: int = 0) -> None:
        """Count a matrix product; unit_bytes: bytes of shared memory that an asynchronous unit read
        for it."""
        self.tensor_macs += macs
        self.unit_bytes += unit_bytes

    def unit_copy(self, size: int) -> None:
        """Count bytes that TMA moves from global to shared memory."""
        self.sectors[self._pc] += -(-size // SECTOR)
        self.unit_bytes += size

    def by_class(self) -> Counter[str]:
        """Return the issues of each of CLASSES, and totals."""
        found = Counter({
            name: int(sum(n for x, n in zip(self.program.code, self.issues, strict=True) if x.op.startswith(starts)))
            for name, starts in CLASSES.items()
        })  # fmt: skip
        found["issues"] = int(self.issues.sum())
        found["wavefronts"], found["minimum wavefronts"] = int(self.wavefronts.sum()), int(self.minimum.sum())
        found["sectors"], found["tensor macs"] = int(self.sectors.sum()), self.tensor_macs
        found["unit bytes"] = self.unit_bytes
        return found
