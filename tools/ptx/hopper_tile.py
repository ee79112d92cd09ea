"""Cost of one more tile of 64 queries and 64 keys in each Hopper kernel of csrc/cuda, to rank
variants of them.

    PYTHONPATH=tools:tests/support python -m ptx.hopper_tile [MACRO]

MACRO chooses other instances, for example TXL_TWO_WARPGROUPS (csrc/cuda/hopper/config.cuh).
nvcc compiles the kernels; their host code is built as in the tests. The costs are differences
between two calls that differ by some tiles and nothing else. docs/kernels-hopper.md explains the
columns.
"""

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from cuda_ptx import PtxModule, compiled_ptx, ptx_module
from hopper_kernels import instance

from txl_kernels import rel_attention
from txl_kernels.backends import cuda
from txl_kernels.backends.limits import PREFILL

TILE = 64  # queries and keys
WARPS = 4  # of a warpgroup
WIDTHS = (64, 128)
KERNELS = ("forward", "backward_queries", "backward_keys")
# (queries, memory) of two calls with the same number of programs, and the number of tiles by which
# they differ.
MORE_KEYS, MORE_QUERIES = ((128, 128), (128, 640), 16), ((128, 384), (384, 128), 32)
HEAD = """| kernel | products | instructions | exponentials | barriers | waits | wavefronts | conflicts | by units, KiB | \
sectors | programs |
|---|---|---|---|---|---|---|---|---|---|---|"""


def counted(module: PtxModule, queries: int, memory: int, width: int, table: str) -> dict[str, Counter[str]]:
    """Return counts by kernel for a bfloat16 call, forward and backward, without a mask.

    table: "" for the paper's terms; with queries of positions, "inside" if all distances have a
    row, or "outside" if none has.
    """

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16).requires_grad_()

    module.counts = {}
    q, k, v = (randn(1, 1, queries, width) for _ in range(3))
    earlier = (randn(1, 1, memory, width), randn(1, 1, memory, width))
    rows, options = memory + 2 * queries, {"causal": False, "zero_row": queries - 1, "backend": "cuda"}
    if table:
        options |= {"q_pos": randn(1, 1, queries, 16), "outside": "zero"}
        options |= {"zero_row": 4 * rows} if table == "outside" else {}
        out = rel_attention(q, k, v, randn(1, rows, 16), None, None, earlier, **options)
    else:
        bias = randn(1, width)
        out = rel_attention(q, k, v, randn(1, rows, width), bias, bias, earlier, **options)
    out.backward(torch.ones_like(out))
    if module.faults:
        raise module.faults[0]
    return {name: module.counts[mangled(module, name)].by_class() for name in KERNELS}


def mangled(module: PtxModule, name: str) -> str:
    """Return the mangled name of the kernel of this name that the last call launched."""
    return next(kernel for kernel in module.counts or () if f"{name}_kernel" in kernel)


def per_tile(module: PtxModule, width: int, table: str) -> dict[str, Counter[str]]:
    """Return the counts of one more tile by kernel."""
    found = {}
    for (short, long, tiles), names in (
        (MORE_KEYS, ("forward", "backward_queries")),
        (MORE_QUERIES, ("backward_keys",)),
    ):
        less, more = (counted(module, *shape, width, table) for shape in (short, long))
        for name in names:
            found[name] = Counter({key: round((n - less[name][key]) / tiles) for key, n in more[name].items()})
    return found


def row(name: str, width: int, table: str, groups: int, counts: Counter[str]) -> str:
    """Format a row of the table under HEAD. groups: consumer warpgroups of a block."""
    start = f"| {width}: {name}{table and f', {table}'} | {counts['tensor macs'] / (TILE * TILE * width):.3g} | "
    cells = [counts["issues"], counts["exponentials"], counts["barriers"] / WARPS, counts["waits"] / WARPS]
    cells += [counts["wavefronts"], counts["wavefronts"] - counts["minimum wavefronts"], counts["unit bytes"] / 1024]
    cells += [counts["sectors"], groups]
    return start + " | ".join(f"{x:,.0f}" for x in cells) + " |"


@contextlib.contextmanager
def module_of(variant: str | None = None) -> Iterator[PtxModule]:
    """A context with the backend's module, whose launches run nvcc's PTX in the executor."""
    module = ptx_module(variant)
    module.use(compiled_ptx("sm_90a", variant))
    pretended = {"_why_not_device": None, "_multiprocessors": 1, "_stream": 0}
    with (
        mock.patch.object(cuda.native, "module", module),
        mock.patch.multiple(cuda, **{name: lambda device, x=x: x for name, x in pretended.items()}),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch.cuda, "current_device", return_value=None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=PREFILL.capability),
    ):
        yield module


def main() -> None:
    print(HEAD)
    with module_of(*sys.argv[1:2]) as module:
        for table, width in itertools.product(("", "inside", "outside"), WIDTHS):
            for name, counts in per_tile(module, width, table).items():
                hopper = instance(mangled(module, name))
                print(row(name, width, table, hopper.groups if hopper else 0, counts), flush=True)


if __name__ == "__main__":
    main()
