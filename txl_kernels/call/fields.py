"""The fields of a call, in the one order that the operators, the bindings and the tests share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """What every backend receives, checked. Shapes as in `rel_attention`.

    The order is the operators' schema. `csrc/python/call.h` holds it too, and a compiled module
    whose order differs is not loaded.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    content_bias: Tensor
    position_bias: Tensor
    k_mem: Tensor | None
    v_mem: Tensor | None
    start: Tensor | None  # int32 [B, L]
    end: Tensor | None  # int32 [B, L]
    seed: Tensor | None  # int64 [1]; present if dropout_p > 0
    ahead: int | None  # keys seen after a query's own; None for all
    window: int | None
    zero_row: int
    scale: float
    dropout_p: float


INPUTS = Call._fields[: Call._fields.index("start")]
BOUNDS = ("start", "end")
TENSORS = (*INPUTS, *BOUNDS, "seed")
SETTINGS = Call._fields[len(TENSORS) :]
Wanted = Sequence[bool]  # which of INPUTS' gradients
ALL: Wanted = (True,) * len(INPUTS)


# Functions, not properties: torch.compile of torch 2.6 does not follow those of named tuples.
def memory_len_of(call: Call) -> int:
    return 0 if call.k_mem is None else call.k_mem.size(2)


def inputs_of(call: Call) -> tuple[Tensor | None, ...]:
    """The tensors that have gradients, named by INPUTS."""
    return (call.q, call.k, call.v, call.r, call.content_bias, call.position_bias, call.k_mem, call.v_mem)


def tensors_of(call: Call) -> tuple[Tensor | None, ...]:
    """Inputs, bounds and seed, named by TENSORS."""
    return (*inputs_of(call), call.start, call.end, call.seed)


def settings_of(call: Call) -> tuple[Any, ...]:
    """What is no tensor, named by SETTINGS."""
    return (call.ahead, call.window, call.zero_row, call.scale, call.dropout_p)


def is_bounded(call: Call) -> bool:
    """Whether `start` or `end` is given."""
    return call.start is not None or call.end is not None


def needs_gradients(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs_of(call))


def empty_like_rows(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape and dtype, with x's strides where they leave the last axis
    contiguous."""
    y = torch.empty_like(x)
    # empty_like sorts the strides of a tensor that overlaps itself (expanded, unfolded) in its own
    # way.
    return y if y.stride(-1) == 1 or y.shape[-1] <= 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_gradients(call: Call, wanted: Wanted = ALL) -> tuple[Tensor, ...]:
    """Uninitialised gradients of the call's inputs, as the backward operator returns them; empty
    where there is no input or none is wanted."""
    return tuple(
        empty_like_rows(x) if x is not None and want else call.q.new_empty(0)  # each its own: outputs may not alias
        for x, want in zip(inputs_of(call), wanted, strict=True)
    )
