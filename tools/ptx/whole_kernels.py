"""What `whole.py` has to know of each kernel, counted: ours for Hopper, Triton's, and plain flash
attention's."""

import functools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ptx import hopper_tile, tile
from ptx.counts import Counts
from ptx.hopper_tile import MORE_KEYS, MORE_QUERIES
from ptx.tile import BLOCK, FLASH_BACKWARD, PROBES, Cost
from ptx.triton_launch import executed
from ptx.whole import Walk, order_of, walk_of
from txl_kernels import rel_attention

KERNELS = ("forward", "backward_queries", "backward_keys")
TEXTS, HEADS, QUERIES, MEMORY = 2, 2, 256, 256  # of the call whose grid is looked at
FLASH_ROWS = 128  # of FA2's blocks (flash_fwd_launch_template.h); the yardstick's tiles have 64


def call_and_backward(backend: str, width: int) -> None:
    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16).requires_grad_()

    q, k, v = (randn(TEXTS, HEADS, QUERIES, width) for _ in range(3))
    earlier = randn(TEXTS, HEADS, MEMORY, width), randn(TEXTS, HEADS, MEMORY, width)
    r, bias = randn(HEADS, MEMORY + 2 * QUERIES, width), randn(HEADS, width)
    out = rel_attention(q, k, v, r, bias, bias, earlier, causal=False, zero_row=QUERIES - 1, backend=backend)
    out.backward(torch.ones_like(out))


def grids(counts: dict[str, Counts]) -> dict[str, tuple[tuple[str, ...], int]]:
    """Of each kernel: the grid's order, and rows of a block."""
    found = {}
    for name in KERNELS:
        own = next(x for kernel, x in counts.items() if f"{name}_kernel" in kernel)
        rows = (MEMORY + QUERIES if "keys" in name else QUERIES) * TEXTS * HEADS
        found[name] = order_of(own, TEXTS, HEADS), rows // len(own.boxes)
    return found


def hopper_walks(widths: list[int]) -> dict[int, dict[str, Walk]]:
    """Of csrc/cuda/hopper, as nvcc compiles it."""
    with tempfile.TemporaryDirectory() as folder, hopper_tile.module_of(Path(folder)) as module:
        return {width: _hopper(module, width) for width in widths}


def _hopper(module: Any, width: int) -> dict[str, Walk]:
    cost = hopper_tile.costs(module, width)
    calls: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for (short, long, _), names in ((MORE_KEYS, KERNELS[:2]), (MORE_QUERIES, KERNELS[2:])):
        less, more = (hopper_tile.counted(module, *shape, width) for shape in (short, long))
        calls |= {name: (less[name], more[name]) for name in names}
    module.counts = {}
    call_and_backward("cuda", width)
    grid = grids(module.counts)
    steps = dict.fromkeys(KERNELS[:2], (4, 12)) | {KERNELS[2]: (2, 6)}
    return {name: walk_of(name, cost[name], calls[name], steps[name], *grid[name], slots=1) for name in KERNELS}


@functools.cache
def _triton(width: int) -> tuple[dict[str, Cost], dict[tile.Shape, Any]]:
    shapes = {shape for short, long, _ in PROBES.values() for shape in (short, long) if shape.atomics}
    return tile.per_tile(90, width), {shape: tile.counted(90, width, shape) for shape in shapes}


def _walk(name: str, width: int, order: tuple[str, ...], rows: int, counted: int | None = None) -> Walk:
    costs, ran = _triton(width)
    cost = costs[f"{name}_kernel"]
    short, long, _ = PROBES[f"{name}_kernel"]
    calls = tuple(ran[shape].counts[f"{name}_kernel"].by_class() for shape in (short, long))
    steps = (
        (short.queries, long.queries) if "keys" in name else (short.queries + short.memory, long.queries + long.memory)
    )
    return walk_of(name, cost, (calls[0], calls[1]), steps, order, rows, cost.programs, counted)


def triton_walks(width: int) -> dict[str, Walk]:
    with executed(90, multiprocessors=1, counting=True) as executor:
        call_and_backward("triton", width)
    grid = grids(executor.counts)
    return {name: _walk(name, width, *grid[name]) for name in KERNELS}


def flash_walks(width: int) -> dict[str, Walk]:
    """The yardstick's tiles in blocks of FA2's size and order: half the L2's bytes a tile."""
    found = {}
    for name in ("flash", *(x.removesuffix("_kernel") for x in FLASH_BACKWARD)):
        found[name] = _walk(name, width, ("text", "head", "block"), FLASH_ROWS, BLOCK)
    return found
