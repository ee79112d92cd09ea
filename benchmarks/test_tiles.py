"""What the Triton backend's table of tiles should say: forward and backward with other tiles, warps and stages.

On a GPU only; the first contestant is the table as it is. Also pointers instead of descriptors, and dr by atomics.
"""

import functools
from collections.abc import Callable
from typing import Any

from contestants import check, entry, fused
from inputs import Shape
from machine import Machine
from race import Entry, Race, Unavailable, races

from txl_kernels.backends.triton import config, plan

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_table")
TILES = [(64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 1), (64, 64, 8, 2), (32, 32, 4, 2), (32, 32, 2, 2)]


class _With:
    """Calls with some of the backend's choices replaced."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __call__(self, run: Callable[..., Any], *arguments: Any) -> Any:
        real = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)
        try:
            return run(*arguments)
        except Exception as error:
            if type(error).__name__ == "OutOfResources":  # Triton's: a tile beyond what the device has
                raise Unavailable(str(error)) from None
            raise
        finally:
            setattr(self.owner, self.name, real)


def _tile(kernel: str, tile: tuple[int, int, int, int]) -> _With:
    real = config.choose

    def choose(which: str, *rest: Any) -> config.Config:
        return config.Config(*tile) if which == kernel else real(which, *rest)

    return _With(config, "choose", choose)


def tiles(machine: Machine, full: bool) -> list[Race]:
    if "triton" not in machine.backends:
        return []
    shape = machine.pick(cpu=None, cuda=Shape(8, 16, 1024, 1024, 64), rehearsal=Shape(1, 1, 32, 32, 16))
    ours = functools.partial(fused, backend="triton")

    def prepare(change: _With | None) -> Entry:
        made = entry(ours, machine, shape, backward=True)
        if change is None:
            return made
        checked = functools.partial(change, check, ours, True, machine.dtype, machine.device, shape)
        return Entry(functools.partial(change, made.run), checked, operations=made.operations)

    sets: dict[str, dict[str, _With]] = {
        "ways": {
            "dr by atomics": _With(config, "dr_by_atomics", lambda: True),
            "pointers": _With(plan, "describable", lambda x: False),
        }
    }
    few = TILES[:1] if machine.kind == "rehearsal" else TILES
    for kernel in KERNELS:
        sets[kernel] = {"{}x{}, {} warps, {} stages".format(*tile): _tile(kernel, tile) for tile in few}
    found = []
    for what, changes in sets.items():
        everyone: dict[str, _With | None] = {"the table's": None, **changes}
        runs = {name: functools.partial(prepare, change) for name, change in everyone.items()}
        found.append(Race("tiles, forward+backward", f"{what}, {shape}", runs, seconds=2, least=2))
    return found


@races(tiles)
def test_tiles(run: Any, race: Race, contestant: str) -> None:
    run(race, contestant)
