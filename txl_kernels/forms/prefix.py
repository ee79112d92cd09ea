"""Keys that every query sees besides its interval: two intervals, merged."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from txl_kernels.call.dropout import new_seed
from txl_kernels.call.span import span
from txl_kernels.checks.settings import check_integer
from txl_kernels.forms.form import Form, plain_arguments
from txl_kernels.forms.merge import merged


def check_prefix(form: Form) -> None:
    """Raises:
    TypeError, ValueError: `prefix` is no number of keys.
    """
    keys = form.memory_len + form.q.size(2)
    check_integer("prefix", form.prefix, 0, f"an integer from 0 to M + L = {keys}")
    if form.prefix > keys:
        raise ValueError(f"prefix must be an integer from 0 to M + L = {keys}, got {form.prefix}")


def with_prefix(form: Form, plain: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """(out, lse). One call where every interval begins at key 0, as a causal one does."""
    prefix = form.prefix
    low, high, valid = _interval(form)
    if form.dropout_p and form.dropout_seed is None:
        form = form._replace(dropout_seed=new_seed(form.q.device))  # one for both calls
    form = form._replace(prefix=0, causal=False, window=None)

    def attention(start: Tensor | None, end: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = plain(**plain_arguments(form._replace(start=start, end=end)), return_lse=True)
        return result

    if low is None:
        return attention(None, torch.where(valid, high.clamp(min=prefix), high))
    joined = (low <= prefix) | (low >= high)  # then it is one interval, from key 0 on
    first = torch.where(joined & valid, 0, low)
    last = torch.where(joined & valid, torch.where(low < high, high, 0).clamp(min=prefix), high)
    none = torch.zeros_like(low)
    return merged([attention(first, last), attention(none, torch.where(joined, none, prefix))])


def _interval(form: Form) -> tuple[Tensor | None, Tensor, Tensor]:
    """First and one-past-last key that settings and bounds let each query see, int32 [B or 1, L],
    the first None where it is 0; and where the bounds are in range."""
    ahead, window = span(form.causal, form.window)
    memory_len, length = form.memory_len, form.q.size(2)
    keys = memory_len + length
    at = torch.arange(memory_len, keys, device=form.q.device, dtype=torch.int32).unsqueeze(0)
    high = torch.full_like(at, keys) if ahead is None else (at + min(ahead, keys) + 1).clamp(max=keys)
    low = None if window is None else (at - min(window - 1, keys)).clamp(min=0)
    valid = torch.ones_like(at, dtype=torch.bool)
    if form.start is not None:
        valid = valid & (form.start >= 0) & (form.start <= keys)
        low = form.start if low is None else torch.where(valid, torch.maximum(low, form.start), form.start)
    if form.end is not None:
        in_range = (form.end >= 0) & (form.end <= keys)
        high = torch.where(in_range, torch.minimum(high, form.end), form.end)
        valid = valid & in_range
    if low is not None:
        low, high, valid = torch.broadcast_tensors(low, high, valid)
    return low, high, valid
