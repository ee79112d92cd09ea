"""Search for the Triton backend's table of tiles: forward and backward with other tiles, numbers of
warps and numbers of stages.

It needs a GPU; the first implementation uses the table as it is. Pointers instead of descriptors
are measured too, and dr without atomics; the latter for all candidates of the kernel that runs only
then.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness.case import Case, Shape
from harness.comparison import Comparison, Entry, Implementation, Unavailable, comparisons
from harness.internals import triton_pointers, triton_same_bits, triton_table_tile, triton_tile
from harness.machine import Machine
from implementations.attention import check, entry, rel_attention_on

KERNELS = ("forward", "backward_queries", "backward_keys")
TABLE = "backward_table"
TILES = [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 1), (64, 64, 8, 2), (32, 32, 4, 2), (32, 32, 2, 2)]
Change = Callable[[], AbstractContextManager[None]]


def under(change: Change, run: Callable[..., Any], *arguments: Any) -> Any:
    """Return run(*arguments), called with one of the backend's choices replaced."""
    try:
        with change():
            return run(*arguments)
    except Exception as error:
        if type(error).__name__ == "OutOfResources":  # Triton's error for a tile that does not fit the device
            raise Unavailable(str(error)) from None
        raise


@comparisons("cuda", "interpreter", backend="triton")
def test_tiles(machine: Machine, full: bool) -> list[Comparison]:
    shape = machine.pick(cpu=None, cuda=Shape(8, 16, 1024, 1024, 64), interpreter=Shape(1, 1, 32, 32, 16))
    ours = rel_attention_on("triton")

    def prepare(change: Change | None) -> Entry:
        made = entry(ours, machine, shape, backward=True)
        if change is None:
            return made
        checked = functools.partial(under, change, check, ours.compute, True, machine.dtype, machine.device, shape)
        return Entry(functools.partial(under, change, made.run), checked, operations=made.operations)

    sets: dict[str, dict[str, Change]] = {"ways": {"the same bits": triton_same_bits, "pointers": triton_pointers}}
    few = TILES[:1] if machine.kind == "interpreter" else TILES
    named = {"{}x{}, {} warps, {} stages".format(*tile): tile for tile in few}
    for kernel in KERNELS:
        sets[kernel] = {name: functools.partial(triton_tile, kernel, tile) for name, tile in named.items()}
    sets[TABLE] = {name: functools.partial(triton_table_tile, tile) for name, tile in named.items()}
    found = []
    for what, changes in sets.items():
        everyone: dict[str, Change | None] = {"the table's": triton_same_bits if what == TABLE else None, **changes}
        runs = [
            Implementation(name, ours.algorithm, functools.partial(prepare, change), ours.role, ours.backend)
            for name, change in everyone.items()
        ]
        case = Case(direction="forward+backward", shape=shape, note=what)
        found.append(Comparison("tiles", case, runs, seconds=2, minimum=2))
    return found
