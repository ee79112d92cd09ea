"""From a form to plain calls, one step a form."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from txl_kernels.checks import check_seed
from txl_kernels.forms.chunks import without_chunk
from txl_kernels.forms.form import Form, check, plain_arguments
from txl_kernels.forms.prefix import check_prefix, with_prefix
from txl_kernels.forms.table import ascending, clamped, with_numbers
from txl_kernels.forms.widths import common_width

Attend = Callable[..., Any]


def attend(form: Form, plain: Attend) -> tuple[Tensor, Tensor]:
    """(out, lse). plain: `rel_attention`.

    Raises:
        TypeError, ValueError: an argument, by name.
    """
    check(form)
    check_seed(form.dropout_seed, form.q)
    check_prefix(form)
    width = form.v.size(3)
    if form.scale is None:
        form = form._replace(scale=1.0 / math.sqrt(form.q.size(3)))
    form = without_chunk(form)
    form = clamped(ascending(form))
    form = common_width(with_numbers(form))
    if form.r.dim() == 4:
        out, lse = _each_text(form, plain)
    else:
        out, lse = _one_table(form, plain)
    return out[..., :width], lse


def _one_table(form: Form, plain: Attend) -> tuple[Tensor, Tensor]:
    form = form._replace(r=form.r.expand(form.q.size(1), -1, -1))
    if form.prefix:
        return with_prefix(form, plain)
    out, lse = plain(**plain_arguments(form), return_lse=True)
    return out, lse


def _each_text(form: Form, plain: Attend) -> tuple[Tensor, Tensor]:
    """A call for each text, whose table r[b] is. Text b drops what a text 0 of seed + b would."""
    batch = form.q.size(0)
    tables = form.r.expand(batch, -1, -1, -1)
    parts = [
        _one_table(
            form._replace(
                **{name: getattr(form, name)[b : b + 1] for name in ("q", "k", "v")},
                memory=None if form.memory is None else tuple(x[b : b + 1] for x in form.memory),
                r=tables[b],
                start=_of_text(form.start, b),
                end=_of_text(form.end, b),
                dropout_seed=None if form.dropout_seed is None else form.dropout_seed + b,
            ),
            plain,
        )
        for b in range(batch)
    ]
    if not parts:
        return form.q.new_empty(form.v.shape), form.q.new_empty(form.q.shape[:3], dtype=torch.float32)
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def _of_text(bound: Tensor | None, b: int) -> Tensor | None:
    """Bounds [B or 1, L or 1] of one text, [1, L or 1]."""
    return bound if bound is None or bound.size(0) == 1 else bound[b : b + 1]
