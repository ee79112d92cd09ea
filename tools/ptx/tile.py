"""Counts of what one more tile of 64 queries and 64 keys costs each Triton kernel.

    PYTHONPATH=tools python -m ptx.tile --capability 90 --width 64
    PYTHONPATH=tools python -m ptx.tile --width 128 --tiles backward_keys=64,64,8,1
    PYTHONPATH=tools python -m ptx.tile --width 128 --positions 16 --outside

Counted by running the PTX: the difference between two calls that differ by some tiles and nothing
else.
"""

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from ptx.occupancy import programs
from ptx.triton_launch import executed
from txl_kernels import rel_attention
from txl_kernels.backends.triton import config

BLOCK = 64  # queries and keys of a tile
CAPABILITIES = (80, 90)
HEAD = """| kernel | products | instructions | exponentials | barriers | waits | wavefronts | conflicts | by units, KiB | \
sectors | programs |
|---|---|---|---|---|---|---|---|---|---|---|"""


class Terms(NamedTuple):
    """Terms of the scores. positions: the width of `q_pos`, or 0 without it. outside: whether tiles
    lie outside the table, with outside="zero"."""

    positions: int = 0
    outside: bool = False


PAPERS = Terms()


class Shape(NamedTuple):
    """Sizes of a call without a mask: batch rows, and blocks of 64 queries and of 64 memory
    positions. atomics: whether dr is added by atomics."""

    batch: int
    queries: int
    memory: int
    atomics: bool = True


# For each kernel: two shapes that differ by `tiles` of its tiles and have the same number of
# programs.
_MORE_KEYS = (Shape(1, 1, 2), Shape(1, 1, 6), 4)
_MORE_QUERIES = (Shape(1, 1, 3), Shape(1, 3, 1), 8)
PROBES: dict[str, tuple[Shape, Shape, int]] = {
    "forward_kernel": _MORE_KEYS,
    "backward_queries_kernel": _MORE_KEYS,
    "backward_keys_kernel": _MORE_QUERIES,
    "backward_queries_kernel, the same bits": tuple(  # type: ignore[dict-item]
        x._replace(atomics=False) if isinstance(x, Shape) else x for x in _MORE_KEYS
    ),
    # the tiles of one batch row, along diagonals
    "backward_table_kernel": (Shape(1, 2, 2, False), Shape(2, 2, 2, False), 10),
}


class Cost(NamedTuple):
    """Counts of one more tile.

    warps: warps of a program, over which the counts are divided. programs: number that a
    multiprocessor runs at once.
    """

    counts: Counter[str]
    warps: int
    programs: int


def counted(capability: int, width: int, shape: Shape, terms: Terms = PAPERS) -> Any:
    """Return the executor after a call, forward and backward."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16).requires_grad_()

    length, memory = BLOCK * shape.queries, BLOCK * shape.memory
    q, k, v = (randn(shape.batch, 1, length, width) for _ in range(3))
    # A short table has rows for distances from -(length - 1) on, which one tile of each call has.
    rows, position_width = 8 if terms.outside else memory + 2 * length, terms.positions or width
    r, content_bias, position_bias = randn(1, rows, position_width), randn(1, width), randn(1, position_width)
    more: dict[str, Any] = {}
    if terms.positions:
        more = {"q_pos": randn(shape.batch, 1, length, position_width), "position_scale": 1.0, "outside": "zero"}
    earlier = randn(shape.batch, 1, memory, width), randn(shape.batch, 1, memory, width)
    with _atomics(shape.atomics), executed(capability, multiprocessors=1, counting=True) as executor:
        more |= {"causal": False, "zero_row": length - 1, "backend": "triton"}
        out = rel_attention(q, k, v, r, content_bias, position_bias, earlier, **more)
        out.backward(torch.ones_like(out))
    return executor


@contextlib.contextmanager
def _atomics(on: bool) -> Iterator[None]:
    with mock.patch.object(config, "dr_by_atomics", return_value=on):
        yield


def difference(short: Counter[str], long: Counter[str], tiles: int) -> Counter[str]:
    """Return the counts of one tile from two calls that differ by `tiles` tiles."""
    return Counter({key: round((n - short[key]) / tiles) for key, n in long.items()})


def per_tile(capability: int, width: int, terms: Terms = PAPERS) -> dict[str, Cost]:
    """Return the cost of one more tile by kernel."""
    shapes = {shape for short, long, _ in PROBES.values() for shape in (short, long)}
    ran = {shape: counted(capability, width, shape, terms) for shape in sorted(shapes)}
    found = {}
    for name, (short, long, tiles) in PROBES.items():
        kernel = name.partition(",")[0]
        less, more = (ran[shape].counts[kernel].by_class() for shape in (short, long))
        compiled = ran[long].compiled[kernel]
        found[name] = Cost(difference(less, more, tiles), compiled.metadata.num_warps, programs(compiled, capability))
    return found


def row(name: str, width: int, cost: Cost) -> str:
    """Format a row of the table under HEAD. Barriers and waits are counts of one warp."""
    counts = cost.counts
    start = f"| {width}: {name.replace('_kernel', '')} | {counts['tensor macs'] / (BLOCK * BLOCK * width):.3g} | "
    cells = [counts["issues"], counts["exponentials"]]
    cells += [counts[key] / cost.warps for key in ("barriers", "waits")]
    cells += [counts["wavefronts"], counts["wavefronts"] - counts["least wavefronts"], counts["unit bytes"] / 1024]
    cells += [counts["sectors"], cost.programs]
    return start + " | ".join(f"{x:,.0f}" for x in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=90)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--positions", type=int, default=0, help="width of q_pos, with outside='zero'; 0: without it")
    parser.add_argument("--outside", action="store_true", help="tiles whose distances have no row of r")
    parser.add_argument("--tiles", nargs="*", default=[], help="kernel=queries,keys,warps,stages instead of ours")
    parser.add_argument("--classes", action="store_true", help="also instructions by class")
    a = parser.parse_args()
    if a.outside and not a.positions:
        parser.error("--outside needs --positions")
    given = {name: config.Config(*map(int, numbers.split(","))) for name, numbers in (x.split("=") for x in a.tiles)}
    ours = config.choose

    def choose(kernel: str, *rest: Any, **more: Any) -> config.Config:
        return given.get(kernel) or ours(kernel, *rest, **more)

    with mock.patch.object(config, "choose", choose):
        found = per_tile(a.capability, a.width, Terms(a.positions, a.outside))
    print(HEAD)
    for name, cost in found.items():
        print(row(name, a.width, cost))
        if a.classes:
            print("  ", dict(cost.counts))


if __name__ == "__main__":
    main()
