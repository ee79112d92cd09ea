"""Tables of positions in another order, too short, or with numbers beside the vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.call.span import span
from txl_kernels.checks.settings import ZERO_ROW, check_integer
from txl_kernels.forms.form import Form

LANES = 8  # head widths stay multiples of it, for aligned rows


def ascending(form: Form) -> Form:
    """Row `zero_row + d` holds distance d; a copy of r if it was not so.

    Raises:
        TypeError, ValueError: `r_descending`, `zero_row`, `r_bias`.
    """
    for name in ("r_descending", "clamp"):
        if not isinstance(getattr(form, name), bool):
            raise TypeError(f"{name} must be True or False, got {type(getattr(form, name)).__name__}")
    _check_numbers(form)
    if not form.r_descending:
        return form
    rows = _rows(form, "r_descending")
    numbers = None if form.r_bias is None else form.r_bias.flip(-1)
    return form._replace(r=form.r.flip(-2), r_bias=numbers, zero_row=rows - 1 - form.zero_row, r_descending=False)


def _rows(form: Form, setting: str) -> int:
    """How many r has, of which `zero_row` is one, as the setting needs.

    Raises:
        TypeError, ValueError: it is not, or r has none.
    """
    rows = form.r.size(-2)
    check_integer("zero_row", form.zero_row, 0, ZERO_ROW)
    if rows == 0:
        raise ValueError(f"r must have a row where {setting}=True, got shape {list(form.r.shape)}")
    if form.zero_row >= rows:
        raise ValueError(f"zero_row must be a row of r (0 to {rows - 1}) where {setting}=True, got {form.zero_row}")
    return rows


def _check_numbers(form: Form) -> None:
    if form.r_bias is None:
        return
    if not isinstance(form.r_bias, Tensor):
        raise TypeError(f"r_bias must be None or a torch.Tensor, got {type(form.r_bias).__name__}")
    heads, rows = form.q.size(1), form.r.size(-2)
    if form.r.dim() != 3 or list(form.r_bias.shape) not in ([heads, rows], [1, rows]):
        raise ValueError(
            f"r_bias must be [H, T] = [{heads}, {rows}] or [1, {rows}] beside an r [H or 1, T, D], got shape "
            f"{list(form.r_bias.shape)} beside {list(form.r.shape)}"
        )
    if form.r_bias.dtype != form.r.dtype or form.r_bias.device != form.r.device:
        raise TypeError(
            f"r_bias must have r's dtype {form.r.dtype} and device {form.r.device}, got {form.r_bias.dtype} on "
            f"{form.r_bias.device}"
        )


def clamped(form: Form) -> Form:
    """Enough copies of r's first and last rows for every distance that settings let a query see."""
    if not form.clamp:
        return form
    rows, length = _rows(form, "clamp"), form.q.size(2)
    ahead, window = span(form.causal, form.window)
    keys = form.memory_len + length
    # A prefix is seen at any distance.
    past = keys - 1 if window is None or form.prefix else min(keys, window) - 1
    future = length - 1 if ahead is None or form.prefix else min(ahead, length - 1)
    before, after = max(future - form.zero_row, 0), max(form.zero_row + past + 1 - rows, 0)
    numbers = form.r_bias
    if numbers is not None:
        numbers = _extended(numbers.unsqueeze(-1), before, after).squeeze(-1)
    return form._replace(
        r=_extended(form.r, before, after), r_bias=numbers, zero_row=form.zero_row + before, clamp=False
    )


def _extended(x: Tensor, before: int, after: int) -> Tensor:
    """x [.., T, D] with its first and last row repeated, whose gradients are sums in a fixed
    order."""
    if not before and not after:
        return x
    first, last = x[..., :1, :], x[..., -1:, :]
    shape = x.shape[:-2]
    return torch.cat([first.expand(*shape, before, -1), x, last.expand(*shape, after, -1)], -2)


def with_numbers(form: Form) -> Form:
    """`r_bias` as one more feature of r, which a position bias of 1 adds to the score: queries and
    keys hold 0 there."""
    numbers = form.r_bias
    if numbers is None:
        return form
    heads, width = form.q.size(1), form.q.size(3)
    more = LANES - width % LANES
    none = form.q.new_zeros(heads, width)
    tables = max(form.r.size(0), numbers.size(0))
    table = torch.cat([form.r.expand(tables, -1, -1), numbers.expand(tables, -1).unsqueeze(-1)], -1)
    position_bias = none if form.position_bias is None else form.position_bias
    position_bias = torch.cat([position_bias, position_bias.new_ones(heads, 1)], -1)
    content_bias = none if form.content_bias is None else form.content_bias
    return form._replace(
        q=F.pad(form.q, (0, more)),
        k=F.pad(form.k, (0, more)),
        r=F.pad(table, (0, more - 1)),
        content_bias=F.pad(content_bias, (0, more)),
        position_bias=F.pad(position_bias, (0, more - 1)),
        memory=None if form.memory is None else (F.pad(form.memory[0], (0, more)), form.memory[1]),
        r_bias=None,
    )
