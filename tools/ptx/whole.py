"""Whole launches on an H100 by the model of `tile.py`: blocks begin in the grid's order on 132
multiprocessors, wait at their start, walk their tiles, and read through the L2.

    PYTHONPATH=tools:tests/support python -m ptx.whole            # the Hopper kernels, and Triton's
    PYTHONPATH=tools:tests/support python -m ptx.whole --widths 64 --only hopper

Counted by running PTX: what a tile costs, a block's clocks outside of its tiles (its waits for
global loads among them), and in which order the grid has texts, heads and blocks, by the boxes that
blocks of a small call ask the copy engine for. Computed: who runs beside whom, and what of it the
L2 still holds. Causal, with a memory as long as the segment.
"""

import argparse
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ptx.counts import SECTOR, Counts
from ptx.tile import BLOCK, Cost, units, waits

# NVIDIA's data sheet of the H100 SXM: multiprocessors, bytes of L2; 3.35 TB/s of memory, of which
# 3.0 are counted on. The L2's rate: Chips and Cheese, "Nvidia's H100", 2023. Reductions of float32
# count as any other bytes: how fast the L2 adds is not published.
MULTIPROCESSORS, HERTZ = 132, 1.7e9
L2_BYTES, L2_RATE, MEMORY_RATE = 50e6, 5.5e12, 3.0e12
B, H = 8, 16
LENGTHS = (512, 2048, 8192)
CHUNK = 256  # rows that the L2 keeps or drops together
ITEM = 2  # bytes of an element


class Walk(NamedTuple):
    """A kernel's blocks.

    rows: of queries or keys in one. order: of (text, head, block), the first
    changes slowest. slots: blocks that a multiprocessor runs at once. clocks: of a tile of 64 x 64.
    start: of a block outside of its tiles. l2_bytes: of a tile. tensors: that a block reads along
    its walk, beside r. keys: whether blocks are of keys. adds: whether it adds to dr.
    """

    rows: int
    order: tuple[str, ...]
    slots: int
    clocks: float
    start: float
    l2_bytes: float
    tensors: int
    keys: bool
    adds: bool


class Time(NamedTuple):
    """seconds: of a launch; bound: what takes them, the blocks (with the L2, in their tiles) or
    memory. memory, l2: bytes."""

    seconds: float
    bound: str
    memory: float
    l2: float


def order_of(counts: Counts, texts: int, heads: int) -> tuple[str, ...]:
    """In which a grid has texts, heads and blocks: blocks of one text and head read many boxes in
    common, those of one head rows of r, others none."""
    boxes = [counts.boxes[index] for index in sorted(counts.boxes, key=lambda at: at[::-1])]
    sizes = {"text": texts, "head": heads, "block": len(boxes) // (texts * heads)}
    for order in itertools.permutations(sizes):
        places = list(itertools.product(*(range(sizes[name]) for name in order)))
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for (one, a), (other, b) in itertools.combinations(zip(places, boxes, strict=True), 2):
            same = {name: x == y for name, x, y in zip(order, one, other, strict=True)}
            kinds.setdefault((same["text"], same["head"]), []).append(len(a & b))
        nothing = [*kinds.get((True, False), []), *kinds.get((False, False), [])]
        if not any(nothing) and min(kinds[True, True]) > max(kinds[False, True]):
            return order
    raise ValueError("blocks share what they read in no known order")


def walk_of(
    name: str, cost: Cost, calls: tuple[Counter[str], Counter[str]], steps: tuple[int, int], order: tuple[str, ...],
    rows: int, slots: int, rows_counted: int | None = None,
) -> Walk:  # fmt: skip
    """calls: counts of two calls of as many blocks, whose walks have so many steps. rows_counted:
    of a block in them, where blocks that are meant have more."""
    short, long = calls
    each = {key: (long[key] - short[key]) / (steps[1] - steps[0]) for key in ("clock", "exposed")}
    rest = {key: (short[key] - steps[0] * x) / short["blocks"] for key, x in each.items()}
    # What warps issue in turns is issued once for each that shares a scheduler.
    sharing = max(1, cost.programs * cost.warps // 4 // slots)
    start = rest["exposed"] + (rest["clock"] - rest["exposed"]) * sharing
    by_unit = units(cost.counts, 90)
    l2_bytes = SECTOR * cost.counts["sectors"] * (rows_counted or rows) / rows
    by_unit["L2"] = l2_bytes * MULTIPROCESSORS * HERTZ / L2_RATE
    clocks = max(by_unit.values()) + waits(cost) / cost.programs
    keys = "keys" in name
    return Walk(
        rows, order, slots, clocks, start, l2_bytes, 3 if keys else 2, keys, "queries" in name and "flash" not in name
    )


def visible(walk: Walk, length: int, block: int) -> tuple[int, int]:
    """Rows [from, to) that a block walks: keys, or queries."""
    memory, first = length, block * walk.rows
    if walk.keys:
        return max(0, first - memory) // BLOCK * BLOCK, length
    return 0, min(memory + length, memory + first + walk.rows)


def blocks_of(walk: Walk, length: int) -> Iterator[tuple[int, int, int]]:
    """(text, head, block) in the grid's order; of queries the last begin first."""
    count = -(-(2 * length if walk.keys else length) // walk.rows)
    sizes = {"text": B, "head": H, "block": count}
    for place in itertools.product(*(range(sizes[name]) for name in walk.order)):
        at = dict(zip(walk.order, place, strict=True))
        yield at["text"], at["head"], at["block"] if walk.keys else count - 1 - at["block"]


def run(walk: Walk, length: int, width: int) -> Time:
    """A launch of B texts, H heads, that many queries and keys of memory."""
    free = [0.0] * (MULTIPROCESSORS * walk.slots)
    touches: list[tuple[float, Any, float, bool]] = []
    tiles = 0
    for text, head, block in blocks_of(walk, length):
        begin = heapq.heappop(free)
        low, high = visible(walk, length, block)
        steps = (high - low + BLOCK - 1) // BLOCK
        tiles += steps * walk.rows // BLOCK
        lasts = steps * walk.rows / BLOCK * walk.clocks * walk.slots
        heapq.heappush(free, begin + walk.start + lasts)
        for chunk in range(low // CHUNK, (high + CHUNK - 1) // CHUNK):
            now = begin + walk.start + lasts * max(0, chunk * CHUNK - low) / (high - low)
            touches.append((now, ("rows", text, head, chunk), ITEM * walk.tensors, False))
            distance = (length + block * walk.rows) // CHUNK - chunk
            distance = -distance if walk.keys else distance
            touches.append((now, ("r", head, distance), ITEM, False))
            if walk.adds:
                touches.append((now, ("dr", head, distance), 2 * ITEM, True))
    touches.sort(key=lambda x: x[0])
    memory = read_through(((key, size * CHUNK * width, dirty) for _, key, size, dirty in touches))
    clocks, l2 = max(free), tiles * walk.l2_bytes
    took = {"blocks": clocks / HERTZ, "memory": memory / MEMORY_RATE}
    bound = max(took, key=took.__getitem__)
    return Time(max(took.values()), bound, memory, l2)


def read_through(touches: Iterable[tuple[Any, float, bool]]) -> float:
    """Bytes that go to and from memory where an L2 keeps what was used last. Touches: (what, bytes,
    whether they are changed, which writes them back)."""
    held: OrderedDict[Any, float] = OrderedDict()
    total = used = 0.0
    for key, size, dirty in touches:
        if key in held:
            held.move_to_end(key)
            continue
        held[key] = size
        used += size
        total += 2 * size if dirty else size
        while used > L2_BYTES:
            used -= held.popitem(last=False)[1]
    return total


def show(name: str, walks: dict[str, Walk], width: int) -> dict[int, dict[str, float]]:
    """Prints a row for each kernel and length; seconds by length and kernel."""
    found: dict[int, dict[str, float]] = {}
    for kernel, walk in walks.items():
        for length in LENGTHS:
            time = run(walk, length, width)
            found.setdefault(length, {})[kernel] = time.seconds
            rate = [f"{x / time.seconds / 1e12:.1f}" for x in (time.memory, time.l2)]
            print(f"| {width}: {name} {kernel} | {length:,} | {', '.join(walk.order)} | {walk.start:,.0f} | "
                  f"{walk.clocks:,.0f} | {time.seconds * 1e6:,.0f} | {time.bound} | {time.memory / 1e6:,.0f} | "
                  f"{rate[0]} | {rate[1]} |", flush=True)  # fmt: skip
    return found


def main() -> None:
    from ptx.whole_kernels import flash_walks, hopper_walks, triton_walks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--only", choices=("hopper", "triton"))
    a = parser.parse_args()
    print(
        "| kernel | L = M | grid, slowest first | start | clocks a tile | us | bound | memory, MB | TB/s | L2, TB/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    hopper = hopper_walks(a.widths) if a.only in (None, "hopper") else {}
    for width in a.widths:
        plain = show("flash", flash_walks(width), width)
        kinds = {"hopper": hopper[width]} if hopper else {}
        if a.only in (None, "triton"):
            kinds["triton"] = triton_walks(width)
        for name, walks in kinds.items():
            ours = show(name, walks, width)
            for length in LENGTHS:
                forward = ours[length]["forward"] / plain[length]["flash"]
                both = sum(ours[length].values()) / sum(plain[length].values())
                print(f"{name}, width {width}, L {length:,}: forward {forward:.2f} x flash, forward and "
                      f"backward {both:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
