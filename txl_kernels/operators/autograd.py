"""The derivative of a call, once, for the three ways in which torch asks for it; and the way a call
takes.

The operators carry it for whoever watches, an autograd function with `setup_context` for
torch.func.grad, which those of torch.library lack, and one without operators for ordinary calls.
"""

from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks
from txl_kernels.backends import KERNELS
from txl_kernels.backends.protocol import Plans
from txl_kernels.call import Call
from txl_kernels.call.fields import INPUTS, needs_gradients, settings_of, tensors_of
from txl_kernels.operators import fast_path, library

_operators = torch.ops.txl_kernels
Results = tuple[Tensor, Tensor | None]


def rel_attention(call: Call, backend: str, plans: Plans | None, need_lse: bool) -> Results:
    """(out, lse) of a checked call that the backend can run. plans: what `fast_path.check` returned
    for it.

    Without `need_lse`, lse may be left out (None) where no gradient will want it.
    """
    result: Results
    if plans is not None and fast_path.is_open():
        kernels = KERNELS[backend]
        if kernels.READS_BOUNDS:
            checks.check_bound_values(call)
        if not needs_gradients(call):
            return kernels.forward(call, plans, need_lse)
        result = _FastPath.apply(*call, backend, plans)  # type: ignore[no-untyped-call]
    elif _inside_functorch():
        result = _ForwardForFunctorch.apply(*call, backend)  # type: ignore[no-untyped-call]
    else:
        result = _operators.rel_attention.default(*call, backend)
    return result


def _inside_functorch() -> bool:
    # A torch without this private name gives its own error for torch.func.grad.
    active = fast_path.in_functorch
    return active is not None and not torch.compiler.is_compiling() and bool(active())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *fields, ctx.backend = inputs
    call = Call(*fields)
    ctx.settings = settings_of(call)
    ctx.save_for_backward(*tensors_of(call), *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of what the operator took: the call's fields and the backend's name."""
    *tensors, out, lse = ctx.saved_tensors
    call = Call(*tensors, *ctx.settings)
    others = (None,) * (len(call) + 1 - len(INPUTS))
    if dout is None and dlse is None:
        return (None,) * len(INPUTS) + others
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = list(ctx.needs_input_grad[: len(INPUTS)])
    plans = _fast_plans(call, ctx.backend, dout, dlse, out, lse)
    if plans is not None:
        dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
        grads = KERNELS[ctx.backend].backward(call, out, lse, dout, dlse, wanted, plans)
    elif _inside_functorch():
        grads = _BackwardForFunctorch.apply(dout, dlse, out, lse, *call, ctx.backend, wanted)  # type: ignore[no-untyped-call]
    else:
        grads = _operators.rel_attention_backward(dout, dlse, out, lse, *call, ctx.backend, wanted)
    given = (gradient if want else None for want, gradient in zip(wanted, grads, strict=True))
    return (*given, *others)


def _fast_plans(call: Call, backend: str, *others: Tensor | None) -> Plans | None:
    """The plans of a backward that needs no operator, its call checked; None if it needs one."""
    # With grad mode on (create_graph=True) the operator is there to say that it has no second
    # derivative.
    if torch.is_grad_enabled() or not fast_path.is_open() or not fast_path.ordinary(*others):
        return None
    # Checked again: `.data` can be set, and hooks can return anything, between forward and
    # backward. What forward saved may be no ordinary tensor: then its memory is not its values.
    return library.checked(call, backend)[1]


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "rel_attention: this backend has no second derivative; call rel_attention(..., backend='reference')"
    )


torch.library.register_autograd("txl_kernels::rel_attention", _gradients, setup_context=_setup_context)
torch.library.register_autograd("txl_kernels::rel_attention_backward", _no_second_derivative)


class _ForwardForFunctorch(torch.autograd.Function):
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)

    @staticmethod
    def forward(*args: Any) -> Results:
        result: Results = _operators.rel_attention.default(*args)
        return result


class _BackwardForFunctorch(torch.autograd.Function):
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = _operators.rel_attention_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""


class _FastPath(torch.autograd.Function):
    """The operator's autograd without the operator."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, *grads), None)  # nothing for the plans

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Results:
        *fields, backend, plans = args
        result = KERNELS[backend].forward(Call(*fields), plans)
        _setup_context(ctx, args[:-1], result)
        return result
