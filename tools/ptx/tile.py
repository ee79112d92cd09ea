"""What one more tile of 64 queries and 64 keys costs each kernel, and the clocks that it takes a
multiprocessor, by a model.

    PYTHONPATH=tools python -m ptx.tile --capability 90 --width 64
    PYTHONPATH=tools python -m ptx.tile --width 128 --tiles backward_keys=64,64,8,1
    PYTHONPATH=tools python -m ptx.tile --write     # predictions.json, for a device to check

Counted from the PTX: the difference between two calls that differ by some tiles and nothing else.
The model: the busiest of tensor units, instruction issue, shared memory and special functions, each
at its peak; and what a program waits, shared among the programs that a multiprocessor runs at once.
"""

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from ptx.counts import UNIT_MACS
from ptx.occupancy import programs
from ptx.triton_launch import executed
from ptx.yardstick import flash_backward, flash_forward
from txl_kernels import rel_attention
from txl_kernels.backends.triton import config

BLOCK = 64  # queries and keys of a tile
MACS = {80: 1024, 90: UNIT_MACS}  # of bfloat16 a clock and multiprocessor
SCHEDULERS, BANK_BYTES, SPECIAL = 4, 128, 16  # warps that issue; bytes and special functions a clock
SPECIAL_CLASSES = ("exponentials", "other special functions")
WARP = 32
BARRIER = 24  # clocks that one takes
PREDICTIONS = Path(__file__).with_name("predictions.json")


class Shape(NamedTuple):
    """Of a call without a mask: texts, and blocks of queries and of memory. atomics: for dr."""

    batch: int
    queries: int
    memory: int
    atomics: bool = True


# Of each kernel: two shapes that differ by `tiles` of its tiles, and not by its programs.
_MORE_KEYS = (Shape(1, 1, 2), Shape(1, 1, 6), 4)
_MORE_QUERIES = (Shape(1, 1, 3), Shape(1, 3, 1), 8)
PROBES: dict[str, tuple[Shape, Shape, int]] = {
    "forward_kernel": _MORE_KEYS,
    "backward_queries_kernel": _MORE_KEYS,
    "backward_keys_kernel": _MORE_QUERIES,
    "backward_queries_kernel, the same bits": tuple(  # type: ignore[dict-item]
        x._replace(atomics=False) if isinstance(x, Shape) else x for x in _MORE_KEYS
    ),
    "backward_table_kernel": (Shape(1, 2, 2, False), Shape(2, 2, 2, False), 10),  # of a text, diagonal
    "flash_kernel": _MORE_KEYS,
    "flash_queries_kernel": _MORE_KEYS,
    "flash_keys_kernel": _MORE_QUERIES,
}
FLASH_BACKWARD = ("flash_queries_kernel", "flash_keys_kernel")


class Cost(NamedTuple):
    """Counts of one more tile, and how many programs a multiprocessor runs at once."""

    counts: Counter[str]
    programs: int
    warps: int


def counted(capability: int, width: int, shape: Shape) -> Any:
    """The executor of a call, forward and backward, of ours and of the plain kernels."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16)

    length, memory = BLOCK * shape.queries, BLOCK * shape.memory
    q, k, v = (randn(shape.batch, 1, length, width).requires_grad_() for _ in range(3))
    r, bias = randn(1, memory + 2 * length, width).requires_grad_(), randn(1, width).requires_grad_()
    earlier = [randn(shape.batch, 1, memory, width).requires_grad_() for _ in range(2)]
    with _atomics(shape.atomics), executed(capability, multiprocessors=1, counting=True) as executor:
        out = rel_attention(q, k, v, r, bias, bias, (earlier[0], earlier[1]), causal=False, zero_row=length - 1,
                            backend="triton")  # fmt: skip
        out.backward(torch.ones_like(out))
        if shape.batch == 1:
            keys, values = (torch.cat([m, x], 2).detach() for m, x in zip(earlier, (k, v), strict=True))
            plain, lse = flash_forward(q.detach(), keys, values)
            flash_backward(q.detach(), keys, values, plain, lse, torch.ones_like(plain))
    return executor


@contextlib.contextmanager
def _atomics(on: bool) -> Iterator[None]:
    with mock.patch.object(config, "dr_by_atomics", return_value=on):
        yield


def per_tile(capability: int, width: int) -> dict[str, Cost]:
    """By kernel."""
    shapes = {shape for short, long, _ in PROBES.values() for shape in (short, long)}
    ran = {shape: counted(capability, width, shape) for shape in sorted(shapes)}
    found = {}
    for name, (short, long, tiles) in PROBES.items():
        kernel = name.partition(",")[0]
        counts = ran[long].counts[kernel].by_class()
        counts.subtract(ran[short].counts[kernel].by_class())
        compiled = ran[long].compiled[kernel]
        counts = Counter({key: round(n / tiles) for key, n in counts.items()})
        found[name] = Cost(counts, programs(compiled, capability), compiled.metadata.num_warps)
    return found


def units(cost: Counter[str], capability: int) -> dict[str, float]:
    """Clocks of each unit, for counts of one tile."""
    return {
        "tensor": cost["tensor macs"] / MACS[capability],
        "issue": cost["issues"] / SCHEDULERS,
        "shared": cost["wavefronts"] + cost["unit bytes"] / BANK_BYTES,
        "special": WARP * sum(cost[name] for name in SPECIAL_CLASSES) / SPECIAL,
    }


def waits(cost: Cost) -> float:
    """Clocks that one program waits a tile: for loads and products, and at barriers."""
    return cost.counts["exposed"] + BARRIER * cost.counts["barriers"] / cost.warps


def clocks(cost: Cost, capability: int) -> float:
    """Of one tile, by the model."""
    return max(units(cost.counts, capability).values()) + waits(cost) / cost.programs


def predictions(capability: int, width: int, found: dict[str, Cost]) -> list[dict[str, Any]]:
    rows = []
    for name, cost in found.items():
        by_unit = units(cost.counts, capability)
        rows.append({
            "capability": capability, "dtype": "bfloat16", "width": width, "kernel": name.replace("_kernel", ""),
            "clocks": round(clocks(cost, capability)), "unit": max(by_unit, key=by_unit.__getitem__),
        })  # fmt: skip
    return rows


def show(capability: int, width: int, found: dict[str, Cost], classes: bool) -> None:
    print("| kernel | tensor | issue | shared memory | special | barriers | waits | programs | conflicts | clocks |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, cost in found.items():
        counts = cost.counts
        extra = counts["wavefronts"] - counts["least wavefronts"]
        cells = [*units(counts, capability).values(), counts["barriers"] / cost.warps, waits(cost), cost.programs]
        cells += [extra, clocks(cost, capability)]
        print(f"| {name.replace('_kernel', '')} |", " | ".join(f"{x:,.0f}" for x in cells), "|", flush=True)
        if classes:
            print("  ", dict(counts))
    total = {kind: sum(clocks(found[x], capability) for x in names) for kind, names in SUMS.items()}
    forward, plain = clocks(found["forward_kernel"], capability), clocks(found["flash_kernel"], capability)
    print(f"forward {forward / plain:.2f} x flash, forward and backward "
          f"{(forward + total['ours']) / (plain + total['flash']):.2f}, with the same bits every run "
          f"{(forward + total['the same bits']) / (plain + total['flash']):.2f}")  # fmt: skip


SUMS = {
    "ours": ("backward_queries_kernel", "backward_keys_kernel"),
    "the same bits": (
        "backward_queries_kernel, the same bits", "backward_keys_kernel", "backward_table_kernel",
    ),
    "flash": FLASH_BACKWARD,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=MACS, default=90)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--tiles", nargs="*", default=[], help="kernel=queries,keys,warps,stages instead of ours")
    parser.add_argument("--classes", action="store_true", help="also instructions by class")
    parser.add_argument("--write", action="store_true", help="our tiles' predictions for sm_90, width 64 and 128")
    a = parser.parse_args()
    if a.write:
        rows = [row for width in (64, 128) for row in predictions(90, width, per_tile(90, width))]
        about = {"model": "python -m ptx.tile --write", "triton": triton.__version__}
        PREDICTIONS.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        return
    given = {name: config.Config(*map(int, numbers.split(","))) for name, numbers in (x.split("=") for x in a.tiles)}
    ours = config.choose

    def choose(kernel: str, *rest: Any, **more: Any) -> config.Config:
        return given.get(kernel) or ours(kernel, *rest, **more)

    with mock.patch.object(config, "choose", choose):
        show(a.capability, a.width, per_tile(a.capability, a.width), a.classes)


if __name__ == "__main__":
    main()
