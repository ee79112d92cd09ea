"""The `native` backend: C++ kernels (csrc/cpu) for CPUs, in float32 and bfloat16 with float32
accumulation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels.backends import native_modules
from txl_kernels.backends.limits import NATIVE
from txl_kernels.backends.protocol import Prepared, why_not_dtype
from txl_kernels.call import (
    ALL,
    Call,
    Wanted,
    drop_threshold,
    empty_like_rows,
    empty_out,
    inputs_of,
)

NAME = "native"
LIMITS = NATIVE
READS_BOUNDS = True
native = native_modules.load("_native", "C++")


def why_not_tensors(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Return the reason why the backend cannot run with tensors of this device and dtype, or None.
    Any head width is supported."""
    if device.type != "cpu":
        return f"{NAME} runs on the cpu, not on {device.type}"
    return why_not_dtype(NAME, LIMITS, dtype, head_width) or native.why_not_loaded


def bounds_fit(call: Call, prepared: Prepared) -> bool:
    """Whether the values of `start` and `end` pass `checks.check_bound_values`; False if that is
    not known because there is no plan yet."""
    return prepared.plan is not None and prepared.plan.plan.bounds_fit(call)


def forward(call: Call, prepared: Prepared | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return (out [B, H, L, D of v], lse float32 [B, H, L]) of a checked call. out has q's strides
    if q is dense."""
    layout = None if prepared is None else prepared.plan
    if layout is None:
        layout = _make_layout(prepared, call, empty_out(call.q, call.v))
    out = layout.empty_like(call.q) if layout.like_q else empty_out(call.q, call.v)
    lse = torch.empty(layout.lse_shape, dtype=torch.float32, device=call.q.device) if need_lse else None
    seed = 0 if call.seed is None else _seed(call.seed)
    layout.plan.forward(call, out, lse, torch.get_num_threads(), seed)
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted = ALL,
    prepared: Prepared | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's inputs, in their order; None where there is no input or
    its gradient is not wanted.

    prepared: the record of calls whose `out` has the same strides.
    """
    layout = None if prepared is None else prepared.plan
    if layout is None:
        layout = _make_layout(prepared, call, out)
    gradients: list[Tensor | None] = []  # a comprehension would be one more function before Python 3.12
    for n, want in enumerate(wanted):
        x: Any = call[n]
        gradients.append(layout.empty_like(x) if want and x is not None else None)
    grads = tuple(gradients)
    seed = 0 if call.seed is None else _seed(call.seed)
    layout.plan.backward(call, out, lse, dout, dlse, grads, torch.get_num_threads(), seed)
    return grads


def make_plan(call: Call, out: Tensor) -> Any:
    """Return the module's plan of a call: everything except the pointers."""
    return module().Plan(call, out, LIMITS.dtypes.index(call.q.dtype), drop_threshold(call.dropout_p))


class _Layout(NamedTuple):
    """A plan, and the shapes of its results, shared by calls of one signature."""

    plan: Any
    empty_like: Callable[[Tensor], Tensor]  # empty_like_rows, or a faster function that gives the same for these inputs
    lse_shape: tuple[int, ...]
    like_q: bool  # out's shape is q's


def _make_layout(prepared: Prepared | None, call: Call, out: Tensor) -> _Layout:
    contiguous = all(x is None or x.is_contiguous() for x in inputs_of(call))
    like = torch.empty_like if contiguous else empty_like_rows
    layout = _Layout(make_plan(call, out), like, tuple(call.q.shape[:3]), call.q.size(3) == call.v.size(3))
    if prepared is not None:
        prepared.plan = layout
    return layout


def _seed(seed: Tensor) -> int:
    return int(seed) & (2**64 - 1)


@functools.cache
def module() -> Any:
    """Return the module, set to run on torch's own thread pool: a second pool would compete with it
    for the cores. The address is 0 where torch uses no OpenMP runtime that exports it."""
    native.module.set_openmp(native_modules.address_of("GOMP_parallel"))
    return native.module
