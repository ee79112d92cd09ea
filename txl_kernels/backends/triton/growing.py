"""Forward's launches for memories of any length, which grow by a token at each step of generation.

Calls that are equal but in the length of their memory share compiled kernels. The kernels take the
length, and the sizes and strides that follow from it, as integers that Triton does not specialize,
or only by their divisibility.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels.backends.triton import plan
from txl_kernels.backends.triton.launch import NOTHING, Changed, Launches, forms_of
from txl_kernels.backends.triton.plan import REMEMBERED, Extent, cached_layout, extent_of, keys_walked, parts_of_keys
from txl_kernels.call import TENSORS, Call

# Returns the launches of calls with exactly these forms; see `passes.lay_out_forward`.
LayOut = Callable[[torch.device, tuple[Any, ...], tuple[Any, ...], str], Launches]

_R, _R_BIAS, _K_MEM, _V_MEM = (TENSORS.index(name) for name in ("r", "r_bias", "k_mem", "v_mem"))
_LEFT, _RIGHT, _ZERO_ROW = (Call._fields.index(name) - len(TENSORS) for name in ("left", "right", "zero_row"))
_DIVISOR = 16  # Triton specializes integers that are multiples of it
# The strides, but of rows, of tensors whose number of rows changes, as kernels name them.
_STRIDES = (
    (_K_MEM, ("km_batch", "km_head")), (_V_MEM, ("vm_batch", "vm_head")), (_R, ("r_head",)), (_R_BIAS, ("rb_head",))
)  # fmt: skip


def run_forward(
    device: torch.device, tensors: Sequence[Tensor | None], settings: tuple[Any, ...], kind: str, lay_out: LayOut
) -> None:
    """Launch forward. tensors: TENSORS, out and lse. The other arguments are those of
    `passes.lay_out_forward`, and that function."""
    forms, last = forms_of(tensors), _last_calls()
    slot = device, forms[0], settings, kind
    before = last.get(slot)
    if before is None or before.forms != forms:
        alike = [*forms]
        for n, _ in _STRIDES:
            if forms[n] is not None:
                alike[n] = _without_rows(n, *forms[n])
        if before is not None and before.alike == alike:
            family = before.family
        else:
            family = _family(device, tuple(alike), settings, kind)
            if len(last) >= REMEMBERED:
                last.clear()
        before = last[slot] = _Last(forms, alike, family, *family.find(device, forms, settings, kind, lay_out))
    layout, changed = before.layout, before.changed
    if changed is not NOTHING and not layout.is_kept():
        layout, changed = lay_out(device, forms, settings, kind), NOTHING
    layout.run(device, tensors, changed)


@cached_layout
def _last_calls() -> dict[Any, "_Last"]:
    """Return the last call of each device, form of q, settings and kind."""
    return {}


class _Last(NamedTuple):
    """A call, and its layout, for calls that are equal to it."""

    forms: tuple[Any, ...]
    alike: list[Any]
    family: "_Family"
    layout: Launches
    changed: Changed


def _without_rows(
    n: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, misaligned: int
) -> tuple[Any, ...]:
    """Return what compiled code depends on in the form of tensor n if its number of rows is an
    integer argument of kernels. The first field is None if the strides before the rows' are such
    arguments, too."""
    first, last = strides[0], strides[-3]  # of batch rows and heads, or of heads alone
    divisible = (first | last) % _DIVISOR == 0
    # Loads of rows depend on the divisibility of strides by other numbers, too; those of `r_bias`
    # do not.
    varies = 0 < first < 2**31 and 0 < last < 2**31 and (divisible or (n == _R_BIAS and first > 1))
    sizes = shape[0], shape[-3], shape[-1]
    return None if varies else (first, last), divisible, sizes, strides[-2:], dtype, misaligned


@cached_layout
def _family(device: torch.device, forms: tuple[Any, ...], settings: tuple[Any, ...], kind: str) -> "_Family":
    return _Family([(n, names) for n, names in _STRIDES if forms[n] is not None and forms[n][0] is None])


class _Family:
    """The layouts of calls that differ in the number of rows of their memory and tables.

    A layout serves all calls whose keys are split into as many parts, which begin at the same row
    of the tables, and which all have a memory, and a row for some distance, or all have none.
    """

    def __init__(self, strides: Sequence[tuple[int, Sequence[str]]]) -> None:
        self._strides = tuple(strides)  # that differ, as in _STRIDES
        self._names = ("M", "T", "left", "right", "zero_row", *(name for _, names in strides for name in names))
        self._blocks: dict[Any, tuple[int, int, int]] = {}
        self._layouts: dict[Any, Launches] = {}

    def find(
        self, device: torch.device, forms: tuple[Any, ...], settings: tuple[Any, ...], kind: str, lay_out: LayOut
    ) -> tuple[Launches, Changed]:
        """Return a layout for a call, and how the call differs from those that were laid out."""
        length = forms[0][0][2]
        memory = 0 if forms[_K_MEM] is None else forms[_K_MEM][0][2]
        rows = forms[_R_BIAS if forms[_R] is None else _R][0][1]
        extent = extent_of(length, memory, rows, settings[_LEFT], settings[_RIGHT], settings[_ZERO_ROW])
        if memory == 0 or extent.left == 0:  # kernels get k and v in place of the memory
            return lay_out(device, forms, settings, kind), NOTHING
        key = extent.first_row, extent.T > 0
        blocks = self._blocks.get(key)
        if blocks is not None:
            programs, block_m, block_n = blocks
            keys = keys_walked(extent, length, block_m)
            layout = self._layouts.get((key, parts_of_keys(programs, keys, block_n, plan.multiprocessors(device))))
            if layout is not None:
                return layout, self._changed(layout, forms, extent)
        layout = lay_out(device, forms, settings, kind)
        (programs, parts), arguments = layout.launches[0].grid, layout.launches[0].arguments
        self._blocks[key] = programs, arguments["BM"], arguments["BN"]
        self._layouts[key, parts] = layout
        return layout, NOTHING

    def _changed(self, layout: Launches, forms: tuple[Any, ...], extent: Extent) -> Changed:
        values = (extent.M, extent.T, extent.left, extent.right, extent.zero_row)
        for n, names in self._strides:
            values += forms[n][1][: len(names)]
        tiles = {}
        if layout.has_tiles:
            parts = [
                (_K_MEM, extent.unseen, extent.M - extent.unseen),
                (_V_MEM, extent.unseen, extent.M - extent.unseen),
            ]
            for n, first, rows in (*parts, (_R, extent.first_row, extent.T)):
                if forms[n] is not None:
                    _, strides, dtype, _ = forms[n]
                    tiles[n] = first * strides[-2] * dtype.itemsize, rows, strides
        return Changed(self._names, values, tiles)
