"""Chunked streaming encoders: a query sees its own chunk and some before it."""

from typing import Any

import torch

from txl_kernels.checks.bounds import broadcast_bound
from txl_kernels.checks.settings import check_integer
from txl_kernels.forms.form import Form

Chunk = tuple[int, int | None] | None


def check_chunk(chunk: Any, causal: Any) -> tuple[int, int | None]:
    """(size, left).

    Raises:
        TypeError, ValueError: chunk is something else, or the attention causal.
    """
    if not isinstance(chunk, (tuple, list)) or len(chunk) != 2:
        raise TypeError(f"chunk must be None or a pair (size, left), got {chunk!r}")
    size, left = chunk
    check_integer("chunk[0]", size, 1, "an integer >= 1 (queries of a chunk)")
    if left is not None:
        check_integer("chunk[1]", left, 0, "None or an integer >= 0 (chunks seen before a query's own)")
    if causal is not False:
        raise ValueError("chunk needs causal=False: a query sees its chunk ahead of itself, too; got causal=True")
    return size, left


def without_chunk(form: Form) -> Form:
    """The same with `start` and `end`, both within [0, M + L].

    Raises:
        TypeError, ValueError: `chunk`, or `start` or `end` beside it.
    """
    given_start, given_end = broadcast_bound("start", form.start, form.q), broadcast_bound("end", form.end, form.q)
    form = form._replace(start=given_start, end=given_end)
    if form.chunk is None:
        return form
    size, left = check_chunk(form.chunk, form.causal)
    length, memory_len = form.q.size(2), form.memory_len
    own = torch.arange(length, device=form.q.device, dtype=torch.int32) // size
    end = (memory_len + (own + 1) * size).clamp(max=memory_len + length).unsqueeze(0)
    if given_end is not None:
        end = torch.where(given_end > memory_len + length, given_end, torch.minimum(end, given_end))
    start = given_start
    if left is not None:
        start = (memory_len + (own - left) * size).clamp(min=0).unsqueeze(0)
        if given_start is not None:  # what is out of range stays so
            start = torch.where(given_start < 0, given_start, torch.maximum(start, given_start))
    return form._replace(chunk=None, start=start, end=end)
