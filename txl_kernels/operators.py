"""The torch operators of a call, and a fast path for calls on which no torch feature depends.

`txl_kernels::rel_attention` and `txl_kernels::rel_attention_backward` take the fields of `Call` and
the name of a backend. Backward also takes `output_mask`, which selects the gradients to compute
(None: all). Users can call the operators directly, so they repeat the checks of `rel_attention`.

torch.library's Python path takes longer than a small kernel. Tracing, transforms, modes, profiling
and tensor subclasses need it. Without them the fast path gives the same results and the same
autograd graph; `txl_kernels.prepare` checks calls of one signature only once.

The derivative is defined once, and registered in three ways: on the operators for tracers and
modes; in an autograd function with `setup_context` for torch.func.grad, which torch.library's own
functions do not support; and in one that skips the operators, for the fast path.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks, library, torch_state
from txl_kernels.backends.protocol import Prepared
from txl_kernels.call import (
    ALL,
    INPUTS,
    TENSORS,
    Call,
    Wanted,
    empty_gradients,
    empty_out,
)
from txl_kernels.prepare import prepare_backward, prepare_operator

Results = tuple[Tensor, Tensor | None]

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?", float: "float",
}  # fmt: skip
_FIELDS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in Call.__annotations__.items())
_GRADIENTS = ", ".join(["Tensor"] * len(INPUTS))


class _Library(torch.library.Library):
    """A library whose autograd kernels raise for forward-mode AD. Those of register_autograd would
    drop the tangents of inputs that do not require gradients."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> None:
        kernel = _without_tangents(fn) if dispatch_key == "Autograd" else fn
        super().impl(op_name, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]


def _without_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel with a check in front that raises if an argument has a tangent.

    torch's transforms unwrap tensors level by level, and only a kernel of the dispatch key Autograd
    sees the tangents of each level. The check takes 10 us for each tensor, so it is skipped where
    `is_plain()`.
    """

    def autograd(keyset: Any, *arguments: Any) -> Any:
        if not torch_state.is_plain():
            for x in arguments:  # torch.compile traces at level 0 without setting `_current_level`
                if isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None:
                    _no_forward_mode()
        return kernel(keyset, *arguments)

    return autograd


def _no_forward_mode(ctx: Any = None, *grads: Any) -> Any:
    raise NotImplementedError(
        "rel_attention: this backend has no forward-mode AD; call rel_attention(..., backend='reference')"
    )


_operators = torch.ops.txl_kernels


def _forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    *fields, backend = arguments
    call = Call(*fields)
    prepared = prepare_operator(call, backend, False)
    result: tuple[Tensor, Tensor | None] = prepared.kernels.forward(call, prepared)
    return result


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, backend, wanted = _parts(arguments)
    kernels = prepare_operator(call, backend, True).kernels
    dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
    return _without_none(call, kernels.backward(call, out, lse, dout, dlse, wanted))


def _without_none(call: Call, grads: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients as an operator returns them: of shape [0] instead of None."""
    return tuple(call.q.new_empty(0) if x is None else x for x in grads)  # separate tensors: outputs may not alias


def _parts(arguments: tuple[Any, ...]) -> tuple[Call, str, Wanted]:
    """Return the call, the backend's name and the mask of wanted gradients. The dispatcher omits an
    `output_mask` of None."""
    fields, (backend, *rest) = arguments[: len(Call._fields)], arguments[len(Call._fields) :]
    mask = rest[0] if rest else None
    if mask is not None and len(mask) != len(ALL):
        raise ValueError(f"output_mask must be None or {len(ALL)} bools, for {', '.join(INPUTS)}; got {len(mask)}")
    return Call(*fields), backend, ALL if mask is None else mask


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, _, wanted = _parts(arguments)
    return _without_none(call, empty_gradients(call, wanted))


def run(call: Call, prepared: Prepared, need_lse: bool) -> Results:
    """Return (out, lse) of a prepared call of ordinary tensors, without the dispatcher; only where
    `torch_state.is_plain(unprofiled=True)`.

    need_lse: False if lse may be None where no gradient needs it.
    """
    if prepared.reads_bounds and not prepared.kernels.bounds_fit(call, prepared):
        checks.check_bound_values(call)
    if not prepared.gradients:
        result: Results = prepared.kernels.forward(call, prepared, need_lse)
        return result
    out = _run_fast_path(*tuple(call)[: len(INPUTS)], (call, prepared, need_lse))
    return out if need_lse else (out, None)


def dispatch(call: Call, backend: str) -> Results:
    """Return (out, lse) of a checked call by the operator, so that features of torch see it."""
    result: Results
    if torch_state.inside_functorch():
        result = _ForwardForFunctorch.apply(*call, backend)  # type: ignore[no-untyped-call]
    else:
        result = _operators.rel_attention.default(*call, backend)
    return result


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *fields, backend = inputs
    _save(ctx, fields, backend, *output)


def _save(ctx: Any, fields: Sequence[Any], backend: str, out: Tensor, lse: Tensor | None) -> None:
    """Save for `_gradients`. fields: those of a `Call`."""
    ctx.settings, ctx.backend = fields[len(TENSORS) :], backend
    ctx.save_for_backward(*fields[: len(TENSORS)], out, lse)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of the forward operator, or of `_FastPath`."""
    *tensors, out, lse = ctx.saved_tensors
    call = Call(*tensors, *ctx.settings)
    needed = ctx.needs_input_grad
    results: list[Tensor | None] = [None] * len(needed)
    if dout is None:
        if dlse is None:
            return tuple(results)
        dout = torch.zeros_like(out)
    # With grad mode on (create_graph=True) the operator must be called: it raises the error that
    # there is no second derivative.
    wanted, prepared = needed[: len(INPUTS)], None
    if not torch.is_grad_enabled() and torch_state.is_plain(unprofiled=True):
        prepared = prepare_backward(call, ctx.backend, out, lse, dout, dlse)
    grads: Sequence[Tensor | None]
    if prepared is not None:
        found, dout, dlse = prepared
        grads = found.kernels.backward(call, out, lse, dout, dlse, wanted, found)
    elif torch_state.inside_functorch():
        grads = _BackwardForFunctorch.apply(dout, dlse, out, lse, *call, ctx.backend, wanted)  # type: ignore[no-untyped-call]
    else:
        grads = _operators.rel_attention_backward(dout, dlse, out, lse, *call, ctx.backend, wanted)
    for n, gradient in enumerate(grads):
        results[n] = gradient if wanted[n] else None
    return tuple(results)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "rel_attention: this backend has no second derivative; call rel_attention(..., backend='reference')"
    )


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """Return a vmap rule that calls the operator once for each example."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        if info.batch_size == 0:
            raise ValueError(f"vmap of {operator} must be over at least one call, got none")
        given = list(zip(arguments, in_dims, strict=True))
        results = [
            operator(*(x.select(axis, n) if isinstance(axis, int) else x for x, axis in given))
            for n in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _implement(made: torch.library.Library) -> None:
    """Add everything that torch needs to know of the operators to their library."""
    forward, backward = (f"txl_kernels::{name}" for name in ("rel_attention", "rel_attention_backward"))
    made.impl("rel_attention", _forward, "CompositeExplicitAutograd")
    made.impl("rel_attention_backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake(forward, _forward_fake, lib=made)
    torch.library.register_fake(backward, _backward_fake, lib=made)
    torch.library.register_autograd(forward, _gradients, setup_context=_setup_context, lib=made)
    torch.library.register_autograd(backward, _no_second_derivative, lib=made)
    for name in (forward, backward):
        operator = getattr(_operators, name.partition("::")[2]).default
        torch.library.register_vmap(name, _one_by_one(operator), lib=made)


library.define(
    f"rel_attention({_FIELDS}, str backend) -> (Tensor, Tensor)",
    "rel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_FIELDS}, str backend, bool[{len(INPUTS)}]? output_mask=None) -> ({_GRADIENTS})",
    implement=_implement,
    of=_Library,
)


class _ForwardForFunctorch(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> Results:
        result: Results = _operators.rel_attention.default(*args)
        return result


class _BackwardForFunctorch(torch.autograd.Function):
    generate_vmap_rule = True
    backward = staticmethod(_no_second_derivative)
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _operators.rel_attention_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing: there is no second derivative."""


class _FastPath(torch.autograd.Function):
    """The operator's autograd function without the operator. Its arguments are the call's inputs,
    so that they get gradients, and (call, prepared, need_lse)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call, prepared, need_lse = args[-1]
        out, lse = prepared.kernels.forward(call, prepared)
        _save(ctx, tuple(call), prepared.kernels.NAME, out, lse)
        return (out, lse) if need_lse else out

    backward = staticmethod(_gradients)


# Function.apply would only check for functorch, which `is_plain` and `signature` have done.
_run_fast_path: Any = super(torch.autograd.Function, _FastPath).apply
