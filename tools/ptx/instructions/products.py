"""wgmma: asynchronous products of a warpgroup, whose results are available after a wait."""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx.decode import instruction
from ptx.faults import Fault, NotModelled
from ptx.instructions.matrices import COLUMN, ROW, fragment, left_factor, numbers
from ptx.lanes import GROUP, WARP
from ptx.operands import constant, items, raw_reader, spread
from ptx.parse import Instruction, Operand, Register, Vector
from ptx.shared_memory import swizzled

_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by the descriptor's layout field


@dataclass
class _Products:
    """Products committed in one group by one warpgroup."""

    cells: list[np.ndarray] = field(default_factory=list)  # cells of shared memory that they read
    results: set[int] = field(default_factory=set)  # registers that they write
    sources: set[int] = field(default_factory=set)


class Products:
    """Pending products of a block, by warpgroup."""

    def __init__(self, threads: int) -> None:
        self.open = [_Products() for _ in range(threads // GROUP)]
        self.groups: list[list[_Products]] = [[] for _ in self.open]


def _products(block: Any) -> Products:
    if block.products is None:
        block.products = Products(block.threads)
    return block.products  # type: ignore[no-any-return]


def _groups(lanes: Any) -> list[int]:
    """Return the warpgroups that execute the instruction together."""
    return [int(g) for g in np.unique(lanes.ids // GROUP)]


def _threads(group: int) -> slice:
    return slice(group * GROUP, group * GROUP + GROUP)


@instruction("wgmma.fence", kind="warpgroup")
def fence(x: Instruction) -> Any:
    return _fence


def _fence(block: Any, lanes: Any) -> None:
    _groups(lanes)
    for mask in block.unfenced.values():
        mask[lanes.at] = False


@instruction("wgmma.commit_group", kind="warpgroup")
def commit(x: Instruction) -> Any:
    return _commit


def _commit(block: Any, lanes: Any) -> None:
    products = _products(block)
    for g in _groups(lanes):
        products.groups[g].append(products.open[g])
        products.open[g] = _Products()


@instruction("wgmma.wait_group", kind="warpgroup")
def wait(x: Instruction) -> Any:
    left = constant(x.operands[0])
    return lambda block, lanes: _wait(block, lanes, left)


def _wait(block: Any, lanes: Any, left: int) -> None:
    products = _products(block)
    for g in _groups(lanes):
        groups = products.groups[g]
        done, products.groups[g] = groups[: len(groups) - left], groups[max(len(groups) - left, 0) :]
        warps = np.arange(4 * g, 4 * g + 4)
        for ended in done:
            for cells in ended.cells:
                block.shared.take_back(cells, warps)
        still = [*products.groups[g], products.open[g]]
        for table, which in ((block.in_flight, "results"), (block.in_use, "sources")):
            ended_slots = set().union(*(getattr(p, which) for p in done)) if done else set()
            for slot in ended_slots - set().union(*(getattr(p, which) for p in still)):
                table[slot][_threads(g)] = False
                if not table[slot].any():
                    del table[slot]


@instruction("wgmma.mma_async", kind="warpgroup")
class Multiply:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.T.T: D = A B (+ D)."""

    def __init__(self, x: Instruction) -> None:
        m = re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32)\.\3$", x.op)
        if m is None:
            raise NotModelled(x.op)
        self.N, self.K, self.kind = int(m[1]), int(m[2]), m[3]
        self.item = 4 if self.kind == "tf32" else 2
        self.results = _slots(items(x.operands[0]))
        self.sources: list[int] = []
        flags = list(x.operands[3:])
        self.left = self.left_descriptor = None
        if isinstance(x.operands[1], Vector):
            self.left, self.sources = fragment(x.operands[1].items, self.kind), _slots(x.operands[1].items)
        else:
            self.left_descriptor = raw_reader(x.operands[1], 64)
        self.right_descriptor = raw_reader(x.operands[2], 64)
        self.adds = raw_reader(flags[0], 1)
        signs, transposed = list(map(constant, flags[1:3])), [*map(constant, flags[3:]), 0, 0]
        if signs != [1, 1]:
            raise NotModelled(x.text)
        self.left_transposed, self.right_transposed = (0, transposed[0]) if self.left else transposed[:2]

    def __call__(self, block: Any, lanes: Any) -> None:
        products = _products(block)
        adds = spread(self.adds(block, lanes), lanes)
        for n, g in enumerate(_groups(lanes)):
            now = products.open[g]
            add = adds[n * GROUP : n * GROUP + GROUP]
            if (add != add[0]).any():
                raise Fault("threads of a warpgroup disagree on whether to add")
            sources = self.sources if block.launch.strict else []
            for slot in [*sources, *(self.results if add[0] else [])]:
                if block.unfenced[slot][_threads(g)].any() and not self._chained(block, slot, g):
                    raise Fault("a product uses a register written after the last wgmma.fence")
            if self.left is not None:
                A = self._from_registers(block, lanes, n)
            else:
                A = self._from_shared(block, lanes, self.left_descriptor, 64, self.left_transposed, n, g, now)
            B = self._from_shared(block, lanes, self.right_descriptor, self.N, self.right_transposed, n, g, now)
            self._accumulate(block, A @ B.T, bool(add[0]), g)
            if block.counts is not None:
                read = self.N + (64 if self.left is None else 0)
                block.counts.product(64 * self.N * self.K, read * self.K * self.item)
            now.results |= set(self.results)
            now.sources |= set(self.sources)
            for table, slots in ((block.in_flight, self.results), (block.in_use, self.sources)):
                for slot in slots:
                    table.setdefault(slot, np.zeros(block.threads, bool))[_threads(g)] = True

    @staticmethod
    def _chained(block: Any, slot: int, g: int) -> bool:
        return slot in block.in_flight and bool(block.in_flight[slot][_threads(g)].all())

    def _from_registers(self, block: Any, lanes: Any, n: int) -> np.ndarray:
        """Return a left factor [64, K] from registers; each warp has 16 rows."""
        assert self.left is not None
        in_use, block.in_use = block.in_use, {}  # registers that other products may read, too
        a = self.left(block, lanes)[4 * n : 4 * n + 4]
        block.in_use = in_use
        return left_factor(a, self.kind, self.K).reshape(64, self.K)

    def _from_shared(
        self, block: Any, lanes: Any, descriptor: Any, rows: int, transposed: Any, n: int, g: int, now: _Products
    ) -> np.ndarray:
        """Return the matrix [rows, K] that a matrix descriptor names."""
        given = spread(descriptor(block, lanes), lanes)[n * GROUP : n * GROUP + GROUP]
        if (given != given[0]).any():
            raise Fault("threads of a warpgroup name different matrices")
        bits = int(given[0])
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        span = _SPANS[bits >> 62 & 3]
        if bits >> 49 & 7 or span == 16:
            raise NotModelled(f"matrix descriptor {bits:#x}")
        row, k = np.arange(rows)[:, None], np.arange(self.K)[None]
        if transposed:
            per = span // self.item
            line = start + row // per * leading + k // 8 * stride + k % 8 * span + row % per * self.item
        else:
            line = start + row // 8 * stride + row % 8 * span + k * self.item
        places = (swizzled(line, span)[..., None] + np.arange(self.item)).reshape(rows, -1)
        firsts = np.arange(4) * WARP + g * GROUP
        now.cells.append(block.shared.lend(places.ravel(), firsts))
        raw = np.ascontiguousarray(block.shared.bytes[places])
        return numbers(raw.view(np.uint32 if self.item == 4 else np.uint16), self.kind)

    def _accumulate(self, block: Any, C: np.ndarray, add: bool, g: int) -> None:
        """Write C [64, N] to the registers: row 16 w + ROW (+ 8), column 8 n + 2 COLUMN (+ 1)."""
        warp = np.arange(4)[:, None]
        for n, slot in enumerate(self.results):
            row = 16 * warp + ROW + 8 * (n % 4 // 2)
            x = C[row, n // 4 * 8 + 2 * COLUMN + n % 2].ravel().astype(np.float32)
            old = block.registers[slot]
            if old is None:
                if add:
                    raise Fault("a product adds to a register that was never written")
                old = np.zeros(block.threads, np.uint32)
            new = old.copy()
            new[_threads(g)] = (x + old[_threads(g)].view(np.float32) if add else x).view(np.uint32)
            block.registers[slot] = new


def _slots(operands: tuple[Operand | None, ...]) -> list[int]:
    if not all(isinstance(operand, Register) for operand in operands):
        raise NotModelled(f"operands {operands}")
    return [operand.slot for operand in operands if isinstance(operand, Register)]
