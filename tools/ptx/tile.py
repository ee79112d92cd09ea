"""What one more tile of 64 queries and 64 keys costs each kernel, and the clocks that it takes by
the busiest unit of a multiprocessor.

    PYTHONPATH=tools python -m ptx.tile --capability 90 --width 64
    PYTHONPATH=tools python -m ptx.tile --width 128 --tiles backward_keys=64,64,8,1

Counted from the PTX: the difference between two lengths of memory. Clocks are a model: tensor
units, instruction issue, shared memory and exponentials each at their peak, and nothing waits.
"""

import argparse
from collections import Counter
from typing import Any
from unittest import mock

import torch

from ptx.triton_launch import executed
from ptx.yardstick import flash_forward
from txl_kernels import rel_attention
from txl_kernels.backends.triton import config

QUERIES, KEYS = 64, 64
SHORT, LONG = 192, 448  # memory
TILES = (LONG - SHORT) // KEYS
MACS = {80: 1024, 90: 2048}  # of bfloat16 a clock and multiprocessor
SCHEDULERS, BANK_BYTES, SPECIAL = 4, 128, 16  # warps that issue; bytes and special functions a clock
SPECIAL_CLASSES = ("exponentials", "other special functions")
WARP = 32


def counted(capability: int, width: int, memory: int) -> dict[str, Counter[str]]:
    """By kernel: what a call of one segment of queries costs."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    q, k, v = (randn(1, 1, QUERIES, width).requires_grad_() for _ in range(3))
    r, bias = randn(1, memory + QUERIES, width).requires_grad_(), randn(1, width).requires_grad_()
    earlier = [randn(1, 1, memory, width).requires_grad_() for _ in range(2)]
    with executed(capability, multiprocessors=1, counting=True) as executor:
        out = rel_attention(q, k, v, r, bias, bias, (earlier[0], earlier[1]), backend="triton")
        out.backward(torch.ones_like(out))
        flash_forward(q.detach(), *(torch.cat([m, x], 2).detach() for m, x in zip(earlier, (k, v), strict=True)))
    return {name: counts.by_class() for name, counts in executor.counts.items()}


def clocks(cost: Counter[str], capability: int) -> dict[str, float]:
    """Of each unit, for counts of one tile."""
    return {
        "tensor": cost["tensor macs"] / MACS[capability],
        "issue": cost["issues"] / SCHEDULERS,
        "shared": cost["wavefronts"] + cost["unit bytes"] / BANK_BYTES,
        "special": WARP * sum(cost[name] for name in SPECIAL_CLASSES) / SPECIAL,
    }


def per_tile(capability: int, width: int) -> dict[str, Counter[str]]:
    """By kernel: counts of one more tile."""
    short, long = (counted(capability, width, memory) for memory in (SHORT, LONG))
    found = {}
    for name, counts in long.items():
        counts.subtract(short[name])
        found[name] = Counter({key: round(n / TILES) for key, n in counts.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=MACS, default=90)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--tiles", nargs="*", default=[], help="kernel=queries,keys,warps,stages instead of ours")
    parser.add_argument("--classes", action="store_true", help="also instructions by class")
    a = parser.parse_args()
    given = {name: config.Config(*map(int, numbers.split(","))) for name, numbers in (x.split("=") for x in a.tiles)}
    ours = config.choose

    def choose(kernel: str, *rest: Any, **more: Any) -> config.Config:
        return given.get(kernel) or ours(kernel, *rest, **more)

    print("| kernel | tensor | issue | shared memory | special functions | the most | barriers | waits | conflicts |")
    print("|---|---|---|---|---|---|---|---|---|")
    with mock.patch.object(config, "choose", choose):
        found = per_tile(a.capability, a.width)
    for name, cost in found.items():
        if not cost["tensor macs"]:
            continue
        units = clocks(cost, a.capability)
        extra = cost["wavefronts"] - cost["least wavefronts"]
        cells = [*units.values(), max(units.values()), cost["barriers"] / 4, cost["waits"] / 4, extra]
        print(f"| {name.removesuffix('_kernel')} |", " | ".join(f"{x:,.0f}" for x in cells), "|")
        if a.classes:
            print("  ", dict(cost))


if __name__ == "__main__":
    main()
