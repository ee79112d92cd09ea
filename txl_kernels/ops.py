"""torch.library operators: schemas, fakes and autograd, so that compile, export and autograd see ordinary operators.

`txl_kernels::rel_attention` and `txl_kernels::rel_attention_backward` take the fields of `Call` and a backend's name.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from txl_kernels import backends, plain, validate
from txl_kernels.backends import BACKENDS
from txl_kernels.call import Call, empty_gradients, empty_like_rows

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor r, Tensor content_bias, Tensor position_bias, Tensor? k_mem, Tensor? v_mem, "
    "Tensor? start, Tensor? end, Tensor? seed"
)
_SETTINGS = "bool causal, SymInt? window, SymInt zero_row, float scale, float dropout_p, str backend"
_N_FIELDS = len(Call._fields)

_library = torch.library.Library("txl_kernels", "DEF")
_library.define(f"rel_attention({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor)")
_library.define(
    f"rel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_SETTINGS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _kernels(backend: str) -> ModuleType:
    if backend not in BACKENDS or not hasattr(BACKENDS[backend], "forward"):
        known = [name for name, module in BACKENDS.items() if hasattr(module, "forward")]
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")
    return BACKENDS[backend]


def _checked(*args: Any) -> tuple[Call, ModuleType]:
    """What pointers rely on: `functional` has checked most of it, but operators can be called by anyone."""
    call, backend = Call(*args[:_N_FIELDS]), args[_N_FIELDS]
    kernels = _kernels(backend)
    reason = backends.cannot_run(backend, call.q.device, call.q.dtype, call.q.size(-1) if call.q.dim() else 1)
    if reason is not None:
        raise RuntimeError(reason)
    plain.check(call)
    reason = backends.refuses(backend, call)
    if reason is not None:
        raise RuntimeError(reason)
    return call, kernels


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    call, kernels = _checked(*args)
    result: tuple[Tensor, Tensor] = kernels.forward(call)
    return result


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    call, kernels = _checked(*args)
    dout, dlse = validate.check_backward(call, out, lse, dout, dlse)
    result: tuple[Tensor, ...] = kernels.backward(call, out, lse, dout, dlse)
    return result


_library.impl("rel_attention", _forward, "CompositeExplicitAutograd")
_library.impl("rel_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("txl_kernels::rel_attention")
def _forward_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("txl_kernels::rel_attention_backward")
def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    call = Call(*args[:_N_FIELDS])
    return empty_gradients(call)


def _inside_functorch() -> bool:
    active: bool = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    return active


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.settings = inputs[:11], inputs[11:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    none: tuple[None, ...] = (None,) * (3 + len(ctx.settings))
    if dout is None and dlse is None:
        return (None,) * 8 + none
    if dout is None:
        dout = torch.zeros_like(out)
    arguments = (dout, dlse, out, lse, *tensors, *ctx.settings)
    call = Call(*arguments[4:-1])
    # With grad mode on (create_graph=True) the operator is there to say that it has no second derivative. The call is
    # checked again: `.data` can be set, and hooks can return anything, between forward and backward.
    direct = not torch.is_grad_enabled() and plain.unwatched() and plain.ordinary(dout, dlse, out, lse)
    if direct and plain.check(call) is not None:
        dout, dlse = validate.check_backward(call, out, lse, dout, dlse)
        grads = BACKENDS[arguments[-1]].backward(call, out, lse, dout, dlse)
    elif _inside_functorch():
        grads = _BackwardForFunctorch.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        grads = torch.ops.txl_kernels.rel_attention_backward(*arguments)
    memory = grads[6:] if tensors[6] is not None else (None, None)
    return (*grads[:6], *memory, *none)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "rel_attention: this backend has no second derivative; call rel_attention(..., backend='reference')"
    )


torch.library.register_autograd("txl_kernels::rel_attention", _autograd, setup_context=_setup_context)
torch.library.register_autograd("txl_kernels::rel_attention_backward", _no_second_derivative)


# torch.func.grad wants an autograd.Function with setup_context, which those of register_autograd lack: the same
# operators and formulas again, in that form.
class _ForwardForFunctorch(torch.autograd.Function):
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_autograd)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.txl_kernels.rel_attention.default(*args)
        return result


class _BackwardForFunctorch(torch.autograd.Function):
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.txl_kernels.rel_attention_backward.default(*args)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""


class _Direct(torch.autograd.Function):
    """The operator's autograd without the operator."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (*_autograd(ctx, *grads), None)  # nothing for memo

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *fields, backend, memo = args
        result: tuple[Tensor, Tensor] = BACKENDS[backend].forward(Call(*fields), memo)
        _setup_context(ctx, args[:-1], result)
        return result


def rel_attention(call: Call, backend: str, memo: plain.Memo | None, need_lse: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call that the backend can run. memo: what `plain.check` returned for it.

    Without `need_lse`, lse may be left out (None) where no gradient will want it.
    """
    result: tuple[Tensor, Tensor]
    if memo is not None and plain.unwatched():
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in call[:8]):
            result = _Direct.apply(*call, backend, memo)  # type: ignore[no-untyped-call]
        else:
            result = BACKENDS[backend].forward(call, memo, need_lse)
    elif _inside_functorch():
        result = _ForwardForFunctorch.apply(*call, backend)  # type: ignore[no-untyped-call]
    else:
        result = torch.ops.txl_kernels.rel_attention.default(*call, backend)
    return result
