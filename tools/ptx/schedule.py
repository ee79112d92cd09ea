"""Schedule of a block's threads: those at the lowest instruction execute together."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ptx.faults import Fault
from ptx.lanes import GROUP, WARP, Lanes, lanes_of

if TYPE_CHECKING:
    from ptx.block import Block
    from ptx.decode import Decoded

STEPS = 20_000_000


@dataclass
class _Waiting:
    """Threads that wait at a barrier of the block; resume: masks of waiting threads by the
    instruction at which they continue."""

    count: int
    arrived: np.ndarray
    resume: dict[int, np.ndarray] = field(default_factory=dict)

    def arrive(self, pc: int, lanes: Lanes, waits: bool, count: int) -> None:
        if count != self.count:
            raise Fault(f"a barrier is for {self.count} threads and for {count}")
        if self.arrived[lanes.at].any():
            raise Fault("a thread arrives twice at a barrier")
        self.arrived = self.arrived | lanes.mask
        if waits:
            self.resume[pc] = self.resume.get(pc, False) | lanes.mask


class Schedule:
    """Masks [threads] by the instruction at which threads are.

    Attributes:
        ready, parked: threads that can continue, and threads that wait at mbarriers.
        groups: masks of warpgroups, in the order in which they run as far as they can.
        waiting: threads at barriers of the block, by barrier number.
        parts: threads that wait for the rest of their warp, at a barrier of the warp, or of their
            warpgroup, at an instruction of four warps.
    """

    def __init__(self, block: "Block") -> None:
        self.block = block
        self.code = block.kernel.code
        self.ready: dict[int, np.ndarray] = {0: np.ones(block.threads, bool)}
        self.parked: dict[int, np.ndarray] = {}
        self.waiting: dict[int, _Waiting] = {}
        self.parts: dict[int, np.ndarray] = {}
        self.ended = np.zeros(block.threads, bool)
        self.all = self.front = np.ones(block.threads, bool)  # front: the threads that are run now
        number = np.arange(block.threads) // GROUP
        self.groups = [number == g for g in block.launch.first]
        self.changes = block.mbarriers.changes  # value of the counter when threads were last woken
        self.steps = 0

    def run(self) -> None:
        """Run until all threads have ended."""
        while self.ready or self.parked or self.waiting or self.parts:
            if self.ready:
                self.front = next((g for g in self.groups if any((x & g).any() for x in self.ready.values())), self.all)
                pc = self._lowest()
                mask = self.ready.pop(pc)
                self._add(pc, mask & ~self.front)
                self._go(pc, mask & self.front)
                continue
            if not self.parked or self.block.mbarriers.changes == self.changes:
                raise Fault(self._why_stuck())
            self._wake()

    def _wake(self) -> None:
        self.changes = self.block.mbarriers.changes
        parked, self.parked = self.parked, {}
        for pc, mask in parked.items():
            self._add(pc, mask)

    def _lowest(self) -> int:
        """Return the lowest instruction of the front's ready threads; the end of the code if there
        are none."""
        if self.front is self.all:
            return min(self.ready, default=len(self.code))
        return min((pc for pc, mask in self.ready.items() if (mask & self.front).any()), default=len(self.code))

    def _add(self, pc: int, mask: np.ndarray) -> None:
        if mask.any():
            self.ready[pc] = self.ready[pc] | mask if pc in self.ready else mask

    def _go(self, pc: int, mask: np.ndarray) -> None:
        """Run threads from pc while they stay together and no ready threads are at a lower or the
        same instruction."""
        block, counts = self.block, self.block.counts
        lanes = lanes_of(mask)
        while pc < len(self.code) and not (self.ready and pc >= self._lowest()):
            block.now = now = self.code[pc]
            self.steps += 1
            if self.steps > STEPS:
                raise Fault("no end is in sight")
            if counts is not None:
                counts.issued(pc, lanes)
            active = self._active(now, lanes)
            is_whole = lanes.whole if now.kind == "warp barrier" else now.kind == "warpgroup" and lanes.whole_groups
            if active.n and active is lanes and is_whole and pc not in self.parts:
                now.run(block, active)
            elif active.n and now.kind != "plain":
                stays = self._control(pc, now, lanes, active)
                if stays is None:
                    return
                pc = stays
                continue
            elif active.n:
                now.run(block, active)
            pc += 1
        if pc == len(self.code):
            self.ended |= mask
        else:
            self._add(pc, mask)

    def _active(self, now: "Decoded", lanes: Lanes) -> Lanes:
        """Return the threads that an instruction's guard enables."""
        if now.guard is None:
            return lanes
        on = now.guard(self.block, lanes)
        if on.all():
            return lanes
        chosen = np.zeros(self.block.threads, bool)
        chosen[lanes.at] = on
        return lanes_of(chosen)

    def _control(self, pc: int, now: "Decoded", lanes: Lanes, active: Lanes) -> int | None:
        """Execute an instruction that may separate threads; return the instruction at which all
        continue, or None if each set of threads has been stored separately."""
        others = lanes.mask & ~active.mask
        if now.kind == "branch":
            if active is lanes:
                return now.target
            self._add(now.target, active.mask)
        elif now.kind == "exit":
            self.ended |= active.mask
        elif now.kind == "wait":
            done = np.zeros(self.block.threads, bool)
            done[active.at] = now.run(self.block, active)
            if done[active.at].all():
                return pc + 1
            self.parked[pc] = self.parked.get(pc, False) | (active.mask & ~done)
            self._add(pc + 1, done)
        elif now.kind in ("warp barrier", "warpgroup"):
            self._gather(pc, now, active, WARP if now.kind == "warp barrier" else GROUP)
        else:
            self._arrive(pc, active, *now.run(self.block, active))
        self._add(pc + 1, others)
        return None

    def _gather(self, pc: int, now: "Decoded", active: Lanes, size: int) -> None:
        """Let the warps or warpgroups (of `size` threads) continue whose threads have all arrived
        at an instruction that they execute together."""
        arrived = self.parts.pop(pc, np.zeros_like(active.mask)) | active.mask
        whole = np.repeat(arrived.reshape(-1, size).all(1), size)
        if whole.any():
            now.run(self.block, lanes_of(whole))
        self._add(pc + 1, whole)
        if (arrived & ~whole).any():
            self.parts[pc] = arrived & ~whole

    def _arrive(self, pc: int, active: Lanes, number: int, count: int | None, waits: bool) -> None:
        """Arrive at a barrier of the block, which is for `count` threads or (None) for all; waits:
        stop until all have arrived."""
        if not active.whole:
            raise Fault("part of a warp arrives at a barrier")
        count = count or self.block.threads
        at = self.waiting.setdefault(number, _Waiting(count, np.zeros(self.block.threads, bool)))
        at.arrive(pc + 1, active, waits, count)
        if not waits:
            self._add(pc + 1, active.mask)
        if at.arrived.sum() == at.count:
            self.block.order.meet(lanes_of(at.arrived))
            for resume, who in at.resume.items():
                self._add(resume, who)
            del self.waiting[number]

    def _why_stuck(self) -> str:
        if self.parked:
            return "threads wait for ever at an mbarrier"
        if any(self.code[pc].kind == "warpgroup" for pc in self.parts):
            return "an instruction of four warps, by fewer threads"
        if self.parts:
            return "threads wait at a barrier of their warp, the rest of which does not come"
        return "threads wait at a barrier that others " + ("have ended before" if self.ended.any() else "do not reach")
