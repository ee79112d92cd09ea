"""What one more tile of 64 queries and 64 keys costs each Hopper kernel of csrc/cuda, by the model
of `tile.py`, beside its yardstick.

    PYTHONPATH=tools:tests/support python -m ptx.hopper_tile

nvcc compiles the kernels; their host code is built as the tests build it. A program is a warpgroup:
those of a block go on by themselves, and wait while others compute.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from cuda_ptx import PtxModule, compile_ptx

from ptx.tile import BARRIER, FLASH_BACKWARD, Cost, clocks, per_tile, units
from txl_kernels import rel_attention
from txl_kernels.backends import cuda

GROUPS = {  # warpgroups of a block that compute, by width and kernel
    64: {"forward": 2, "backward_queries": 2, "backward_keys": 2},
    128: {"forward": 2, "backward_queries": 1, "backward_keys": 1},
}
# Queries and memory of two calls that differ by so many tiles and not by their programs.
MORE_KEYS, MORE_QUERIES = ((128, 128), (128, 640), 16), ((128, 384), (384, 128), 32)


def counted(module: PtxModule, queries: int, memory: int, width: int) -> dict[str, Counter[str]]:
    """Of a call and its backward, without a mask, in bfloat16; by kernel."""

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16).requires_grad_()

    module.counts = {}
    q, k, v = (randn(1, 1, queries, width) for _ in range(3))
    earlier = (randn(1, 1, memory, width), randn(1, 1, memory, width))
    r, bias = randn(1, memory + 2 * queries, width), randn(1, width)
    out = rel_attention(q, k, v, r, bias, bias, earlier, causal=False, zero_row=queries - 1, backend="cuda")
    out.backward(torch.ones_like(out))
    if module.faults:
        raise module.faults[0]
    names = ("forward", "backward_queries", "backward_keys")
    return {
        name: next(c for kernel, c in module.counts.items() if f"{name}_kernel" in kernel).by_class() for name in names
    }


def costs(module: PtxModule, width: int) -> dict[str, Cost]:
    """Of each kernel."""
    found = {}
    for probe, names in ((MORE_KEYS, ("forward", "backward_queries")), (MORE_QUERIES, ("backward_keys",))):
        short, long, tiles = probe
        less, more = (counted(module, *shape, width) for shape in (short, long))
        for name in names:
            more[name].subtract(less[name])
            each = Counter({key: round(n / tiles) for key, n in more[name].items()})
            # The first warpgroup's waits were divided by the tiles of all.
            each["exposed"] *= GROUPS[width][name]
            found[name] = Cost(each, GROUPS[width][name], 4)
    return found


def show(width: int, found: dict[str, Cost]) -> float:
    for name, cost in found.items():
        by_unit = units(cost.counts, 90)
        waited = cost.counts["exposed"] + BARRIER * cost.counts["barriers"] / cost.warps
        cells = [*by_unit.values(), cost.counts["barriers"] / cost.warps, waited, cost.programs]
        cells += [cost.counts["wavefronts"] - cost.counts["least wavefronts"], clocks(cost, 90)]
        print(f"| {width}: {name} |", " | ".join(f"{x:,.0f}" for x in cells), "|", flush=True)
    return sum(clocks(cost, 90) for cost in found.values())


@contextlib.contextmanager
def module_of(folder: Path) -> Iterator[PtxModule]:
    """The backend's module, whose launches run nvcc's PTX; loads start as soon as there is room."""
    module = PtxModule(folder)
    module.use(compile_ptx(folder, "sm_90a", patterns=("hopper/*_bf16.cu",)))
    module.first = (2, 1)
    pretended = {"_absent_from": None, "_multiprocessors": 1, "_stream": 0, "_capability": cuda.HOPPER}
    with (
        mock.patch.object(cuda.native, "module", module),
        mock.patch.multiple(cuda, **{name: lambda device, x=x: x for name, x in pretended.items()}),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
    ):
        yield module


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, module_of(Path(folder)) as module:
        ours = {width: costs(module, width) for width in GROUPS}
    print("| kernel | tensor | issue | shared memory | special | barriers | waits | programs | conflicts | clocks |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for width, found in ours.items():
        total = show(width, found)
        flash = per_tile(90, width)
        forward, backward = clocks(flash["flash_kernel"], 90), sum(clocks(flash[x], 90) for x in FLASH_BACKWARD)
        print(f"width {width}: forward {clocks(found['forward'], 90) / forward:.2f} x flash, forward and backward "
              f"{total / (forward + backward):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
