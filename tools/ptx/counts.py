"""What a launch cost, by instruction: issues, wavefronts of shared memory, sectors of global."""

from collections import Counter
from typing import Any

import numpy as np

from ptx.lanes import WARP, Lanes
from ptx.parse import Program

BANKS, BANK = 32, 4
SECTOR = 32
# Clocks from a load's start to its end, if the L2 has it: by the copy engine, by cp.async; and of
# an ordinary load that goes to memory, as a block's first ones do: 479 on an H100, 262 from its L2
# (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024).
UNIT_LATENCY, COPY_LATENCY, LOAD_LATENCY = 700, 300, 479
UNIT_MACS = 2048  # of bfloat16 that asynchronous products do a clock
_CLASSES = (
    ("tensor", ("mma", "wgmma.mma_async")),
    ("exponentials", ("ex2",)),
    ("other special functions", ("lg2", "rcp", "sqrt", "rsqrt", "div", "sin", "cos", "tanh")),
    ("barriers", ("bar.sync", "barrier")),
    ("waits", ("mbarrier.try_wait", "cp.async.wait", "wgmma.wait_group")),
    ("shared", ("ld.shared", "st.shared", "ldmatrix", "stmatrix")),
    ("global", ("ld.global", "st.global", "red", "atom", "cp.async")),
    ("shuffles", ("shfl", "redux", "vote", "elect")),
    ("conversions", ("cvt",)),
    ("float32", ("fma", "add.f", "add.rn", "mul.f", "mul.rn", "sub.f", "max.f", "min.f", "neg.f", "abs.f", "sub.rn")),
)


class Counts:
    """Sums over all blocks of a launch; entries [instructions].

    Attributes:
        issues: times a warp issued it.
        wavefronts, least: 128-byte cycles of shared memory it took, and would without conflicts.
        sectors: of 32 bytes that it moved from or to global memory.
        tensor_macs: multiply-adds of matrix products. unit_bytes: of shared memory that
            asynchronous units read or wrote.
        clock: instructions that a block's first warp has issued and clocks it has waited, for the
            time that went by.
        exposed: of them clocks that it waited for loads and asynchronous products.
        trips: times that it waited for a load of global memory which it had asked for after it
            last waited for one.
        blocks: that have begun. ahead: their first warps' clocks up to the first product.
        boxes: that the copy engine brought, as (tensor, corner), by block.
    """

    def __init__(self, program: Program, groups_apart: bool = False) -> None:
        """groups_apart: warpgroups work each for itself; waits are those of the first."""
        self.program, self.groups_apart = program, groups_apart
        size = len(program.code)
        self.issues, self.wavefronts, self.least, self.sectors = (np.zeros(size, np.int64) for _ in range(4))
        self.tensor_macs = 0
        self.unit_bytes = 0
        self.clock = 0
        self.exposed = self.trips = self.blocks = self.ahead = 0
        self.boxes: dict[tuple[int, ...], set[Any]] = {}
        self._began: int | None = None  # of a block that has not multiplied yet
        self._resumed = 0  # after the last wait for a load
        self._pc = 0
        self._started: dict[int, int] = {}  # by mbarrier: when the last of its copies started
        self._products: tuple[int, int] | None = None  # when those under way started, and multiply-adds
        self._ends: list[int] = []  # with groups apart: when each committed group of products is done

    def issued(self, pc: int, lanes: Lanes) -> None:
        self._pc = pc
        self.issues[pc] += len(lanes.warps)
        self.clock += int(lanes.warps[0] == 0)

    def block_began(self) -> None:
        self.blocks += 1
        self._began = self.clock

    def load_awaited(self, started: int) -> None:
        """By the first warp, for a register that a load of global memory, begun then, writes."""
        before = self.clock
        self._wait(started, LOAD_LATENCY)
        if self.clock > before:
            self.trips += int(started >= self._resumed)
            self._resumed = self.clock

    def box_started(self, mbarrier: int) -> None:
        self._started[mbarrier] = self.clock

    def box_awaited(self, mbarrier: int) -> None:
        """By the first warp, which goes on."""
        if mbarrier in self._started:
            self._wait(self._started.pop(mbarrier), UNIT_LATENCY)

    def copies_awaited(self, started: int) -> None:
        """By the first warp. started: the last of its cp.async that it waits for."""
        self._wait(started, COPY_LATENCY)

    def products_committed(self) -> None:
        """By the first warpgroup: they follow its earlier ones."""
        if self.groups_apart and self._products is not None:
            started, macs = self._products
            self._ends.append(max([started, *self._ends[-1:]]) + macs // UNIT_MACS)
            self._products = None

    def products_awaited(self, left: int) -> None:
        """By the first warpgroup: all but the last `left` groups that it committed."""
        if self.groups_apart:
            done, self._ends = self._ends[: len(self._ends) - left], self._ends[max(len(self._ends) - left, 0) :]
            if done:
                self._wait(self.clock, done[-1] - self.clock)
        elif left == 0 and self._products is not None:
            started, macs = self._products
            self._wait(started, macs // UNIT_MACS)
            self._products = None

    def _wait(self, started: int, takes: int) -> None:
        waited = max(0, takes - (self.clock - started))
        self.exposed += waited
        self.clock += waited

    def shared_access(self, address: np.ndarray, width: int, warp: np.ndarray) -> None:
        """Threads access `width` bytes each: lanes of a warp in parts of 128 bytes, whose distinct
        words in one bank take a wavefront each."""
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
        self.least[self._pc] += len(load)

    def global_access(self, address: np.ndarray, width: int, warp: np.ndarray) -> None:
        places = address[:, None].astype(np.int64) + np.array([0, width - 1])
        keys = np.unique((warp[:, None].astype(np.int64) << 56 | places // SECTOR).ravel())
        self.sectors[self._pc] += len(keys)

    def product(self, macs: int, unit_bytes: int = 0, group: int = 0) -> None:
        """unit_bytes: of shared memory that it read by itself. group: the warpgroup whose it is."""
        self.tensor_macs += macs
        self.unit_bytes += unit_bytes
        if self._began is not None and not group:
            self.ahead += self.clock - self._began
            self._began = None
        if unit_bytes and not (self.groups_apart and group):
            started, earlier = (self.clock, 0) if self._products is None else self._products
            self._products = started, earlier + macs

    def unit_copy(self, size: int, block: tuple[int, ...], box: Any) -> None:
        """The copy engine moves bytes from global to shared memory."""
        self.boxes.setdefault(block, set()).add(box)
        self.sectors[self._pc] += -(-size // SECTOR)
        self.unit_bytes += size

    def by_class(self) -> Counter[str]:
        """Issues by class of instruction, with totals."""
        found: Counter[str] = Counter()
        for instruction, n in zip(self.program.code, self.issues, strict=True):
            if n:
                found[class_of(instruction.op)] += int(n)
        found["issues"] = int(self.issues.sum())
        found["wavefronts"], found["least wavefronts"] = int(self.wavefronts.sum()), int(self.least.sum())
        found["sectors"], found["tensor macs"] = int(self.sectors.sum()), self.tensor_macs
        found["unit bytes"], found["exposed"] = self.unit_bytes, self.exposed
        found["clock"], found["trips"], found["blocks"], found["ahead"] = (
            self.clock,
            self.trips,
            self.blocks,
            self.ahead,
        )
        return found

    def conflicts(self) -> list[tuple[int, str]]:
        """(wavefronts beyond the least, instruction), most first."""
        extra = self.wavefronts - self.least
        return [(int(extra[n]), self.program.code[n].text) for n in np.argsort(-extra) if extra[n] > 0]


def class_of(op: str) -> str:
    """Which of the classes an instruction belongs to."""
    for name, starts in _CLASSES:
        if op.startswith(starts):
            return name
    return "integer and control"
