"""The torch operators of a call, and a fast path for ordinary calls that no torch feature has to
see.

`txl_kernels::rel_attention` and `txl_kernels::rel_attention_backward` take the fields of `Call` and
a backend's name; backward also `output_mask`, which of the gradients are wanted (None: all). Anyone
can call them, so they check what `rel_attention` has checked already.

torch.library's Python path costs more than a small kernel. It is needed for tracing, transforms,
modes, profiling and tensor subclasses; a call without any of these gives the same results, and the
same autograd graph, without it, and what was checked once holds again.

The derivative is there once, for the three ways in which torch asks for it: the operators carry it
for tracers and modes, an autograd function with `setup_context` for torch.func.grad, which those of
torch.library lack, and one without operators for ordinary calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks
from txl_kernels.backends import KERNELS, cpu, reference, self_check, why_not_kind
from txl_kernels.backends.protocol import Kernels, Prepared
from txl_kernels.call import (
    ALL,
    INPUTS,
    Call,
    Wanted,
    empty_gradients,
    empty_out,
    inputs_of,
    needs_gradients,
    settings_of,
    tensors_of,
)

Results = tuple[Tensor, Tensor | None]

_ORDINARY = (Tensor, torch.nn.Parameter)
_SETTING_TYPES = (type(None), bool, int, float)
_MAX_SIGNATURES = 4096
_known: dict[Any, Prepared] = {}  # by signature; of backwards by that and the backend


def _find(path: str) -> Any:
    """torch.<path>; None where this torch has no such private name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Torch features that must see the operator: transforms, dispatch modes, tracers, profilers. They
# are asked by private names of torch, any of which another version may lack; then every call takes
# the dispatcher, which is slower by some microseconds and always right.
_NAMES = (
    "_C._are_functorch_transforms_active", "_C._len_torch_dispatch_stack",
    "_ops._len_torch_dispatch_stack_pre_dispatch", "_C._is_tracing", "_C._autograd._profiler_enabled", "_C._has_storage",
    "autograd.forward_ad", "autograd.forward_ad._current_level", "Tensor._is_zerotensor",
)  # fmt: skip
_found = [_find(name) for name in _NAMES]
in_functorch, _modes, _pre_dispatch_modes, _tracing, _profiling, _has_storage, _forward_ad, *_ = _found
AVAILABLE = None not in _found


def is_plain() -> bool:
    """Whether no tracer, transform or dispatch mode has a part in what operators do.

    A TorchFunctionMode does not count: torch.set_default_device is one.
    """
    return AVAILABLE and not (
        torch.compiler.is_compiling()
        or in_functorch()
        or _modes()
        or _pre_dispatch_modes()
        or _tracing()
        or _forward_ad._current_level >= 0
    )


def is_open() -> bool:
    """Whether no torch feature has to see operators, the profiler included."""
    return is_plain() and not _profiling()


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all are dense tensors of no subclass, whose memory holds their values."""
    return AVAILABLE and all(
        x is None
        or (
            type(x) in _ORDINARY
            and x.layout is torch.strided
            and not x.is_neg()
            and not x._is_zerotensor()
            and _has_storage(x)
        )
        for x in tensors
    )


def signature(call: Call, *others: Tensor | None) -> Any:
    """All that decides whether a call, with `others` beside it, is valid, but for the values in its
    tensors; hashable. None for what is not ordinary.

    Ordinary tensors are dense, of no subclass, and their memory holds their values: torch has views
    that negate, zeros without memory, and batches (of torch.autograd.grad) that look like one
    tensor. The C++ module tells in a microsecond what takes Python ten.
    """
    if not AVAILABLE:
        return None
    if cpu.native.module is not None:
        return cpu.native.module.signature(call, _ORDINARY, others)
    *tensors, _ = tensors_of(call)  # the seed is another at every call
    settings = settings_of(call)
    if not ordinary(*tensors, *others) or not all(type(x) in _SETTING_TYPES for x in settings):
        return None
    forms = [None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in (*tensors, *others)]
    return (*forms, *((type(x), x) for x in settings))  # True, 1 and 1.0 are equal, but not equally valid


def _is_written_down() -> bool:
    """Whether a compiler or tracer follows the call, and would miss what is remembered."""
    return torch.compiler.is_compiling() or (AVAILABLE and _tracing())


def _remember(key: Any) -> Prepared:
    if len(_known) >= _MAX_SIGNATURES:
        _known.clear()
    prepared = _known[key] = Prepared()
    return prepared


def check(call: Call) -> Prepared | None:
    """`checks.check`, once for all calls of a signature: what is kept for these; None if the call
    is not ordinary.

    Raises:
        TypeError, ValueError: as `checks.check`.
    """
    if _is_written_down():
        checks.check(call)
        return None
    key = signature(call)
    prepared = None if key is None else _known.get(key)
    if prepared is None:
        checks.check(call)
        if key is not None:
            prepared = _remember(key)
    return prepared


_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?", float: "float",
}  # fmt: skip
_FIELDS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in Call.__annotations__.items())
_GRADIENTS = ", ".join(["Tensor"] * len(INPUTS))


class _Derivatives(torch.library.Library):
    """Derivatives that refuse forward-mode AD: what register_autograd makes drops the tangents of
    inputs that do not require gradients."""

    def impl(self, op_name: Any, fn: Any, *key: Any, **options: Any) -> None:
        super().impl(op_name, _without_tangents(fn), *key, **options)  # type: ignore[no-untyped-call]


def _without_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, called where no argument has a tangent.

    torch's transforms peel their wrappers off level by level, and only a kernel of the key Autograd
    sees the tangents of each. To ask takes 10 us a tensor, so a plain call is not asked.
    """

    def autograd(keyset: Any, *arguments: Any) -> Any:
        if not is_plain():
            for x in arguments:  # torch.compile traces a level without telling `_current_level`: it is 0
                if isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x, level=0).tangent is not None:
                    _no_forward_mode()
        return kernel(keyset, *arguments)

    return autograd


def _no_forward_mode(ctx: Any = None, *grads: Any) -> Any:
    raise NotImplementedError(
        "rel_attention: this backend has no forward-mode AD; call rel_attention(..., backend='reference')"
    )


_operators = torch.ops.txl_kernels
_library = torch.library.Library("txl_kernels", "DEF")
_library.define(f"rel_attention({_FIELDS}, str backend) -> (Tensor, Tensor)")
_library.define(
    "rel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_FIELDS}, str backend, bool[{len(INPUTS)}]? output_mask=None) -> ({_GRADIENTS})"
)


def checked(call: Call, backend: str, gradients: bool) -> Kernels:
    """The kernels for a call that anyone may have made, of values or of gradients.

    Raises:
        TypeError, ValueError: an argument, as `rel_attention` would say.
        RuntimeError: the backend cannot run here, does not take the call, or failed at the first
            call of this kind, with the reason.
    """
    if backend not in KERNELS:
        raise ValueError(f"backend must be one of {', '.join(KERNELS)}, got {backend!r}")
    kernels = KERNELS[backend]
    key = None if _is_written_down() else signature(call)
    prepared = None if key is None else _known.get(key)
    if prepared is None or (backend, gradients) not in prepared.checked:
        prepared = _check(kernels, call, gradients)
        if prepared is not None and self_check.is_settled(self_check.kind_of(backend, call, gradients)):
            prepared.checked.add((backend, gradients))
    if kernels.READS_BOUNDS:
        checks.check_bound_values(call)
    return kernels


def _check(kernels: Kernels, call: Call, gradients: bool) -> Prepared | None:
    """All of `checked` that a call's signature decides."""
    reason = kernels.why_not_tensors(call.q.device, call.q.dtype, call.q.size(-1) if call.q.dim() else 1)
    if reason is not None:
        raise RuntimeError(reason)
    prepared = check(call)
    if call.seed is None and call.dropout_p > 0:
        raise TypeError("seed must be an int64 tensor of one element where dropout_p > 0, got None")
    checks.check_seed(call.seed, call.q, "seed")
    reason = kernels.why_not_call(call) or why_not_kind(kernels.NAME, call, gradients)
    if reason is not None:
        raise RuntimeError(reason)
    return prepared


def _forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    *fields, backend = arguments
    call = Call(*fields)
    return checked(call, backend, False).forward(call)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, backend, wanted = _parts(arguments)
    kernels = checked(call, backend, True)
    dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
    grads = kernels.backward(call, out, lse, dout, dlse, wanted)
    return tuple(call.q.new_empty(0) if x is None else x for x in grads)  # each its own: outputs may not alias


def _parts(arguments: tuple[Any, ...]) -> tuple[Call, str, Wanted]:
    """The call, the backend and which gradients are wanted; the dispatcher leaves out a mask of
    None."""
    fields, (backend, *rest) = arguments[: len(Call._fields)], arguments[len(Call._fields) :]
    mask = rest[0] if rest else None
    if mask is not None and len(mask) != len(ALL):
        raise ValueError(f"output_mask must be None or {len(ALL)} bools, for {', '.join(INPUTS)}; got {len(mask)}")
    return Call(*fields), backend, ALL if mask is None else mask


_library.impl("rel_attention", _forward, "CompositeExplicitAutograd")
_library.impl("rel_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("txl_kernels::rel_attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("txl_kernels::rel_attention_backward")
def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, _, wanted = _parts(arguments)
    return empty_gradients(call, wanted)


def rel_attention(call: Call, backend: str, prepared: Prepared | None, need_lse: bool) -> Results:
    """(out, lse) of a checked call that the backend can run. prepared: what `check` returned.

    Without `need_lse`, lse may be left out (None) where no gradient will want it.
    """
    result: Results
    if backend == reference.NAME:
        if not torch.compiler.is_compiling():
            checks.check_bound_values(call)
        return reference.forward(call)
    if prepared is not None and is_open():
        kernels = KERNELS[backend]
        if kernels.READS_BOUNDS:
            checks.check_bound_values(call)
        if not needs_gradients(call):
            return kernels.forward(call, prepared, need_lse)
        out = _run_fast_path(*inputs_of(call), (call, backend, prepared, need_lse))
        result = out if need_lse else (out, None)
    elif _inside_functorch():
        result = _ForwardForFunctorch.apply(*call, backend)  # type: ignore[no-untyped-call]
    else:
        result = _operators.rel_attention.default(*call, backend)
    return result


def _inside_functorch() -> bool:
    # A torch without this private name gives its own error for torch.func.grad.
    return in_functorch is not None and not torch.compiler.is_compiling() and bool(in_functorch())


def _keep(ctx: Any, call: Call, backend: str, out: Tensor, lse: Tensor | None) -> None:
    ctx.settings, ctx.backend = settings_of(call), backend
    ctx.save_for_backward(*tensors_of(call), out, lse)
    ctx.set_materialize_grads(False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *fields, backend = inputs
    _keep(ctx, Call(*fields), backend, *output)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of what the operator took: the call's fields and the backend's name."""
    others = (None,) * (len(Call._fields) + 1 - len(INPUTS))
    return (*_input_gradients(ctx, dout, dlse), *others)


def _input_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Sequence[Tensor | None]:
    *tensors, out, lse = ctx.saved_tensors
    call = Call(*tensors, *ctx.settings)
    if dout is None:
        if dlse is None:
            return (None,) * len(INPUTS)
        dout = torch.zeros_like(out)
    wanted = ctx.needs_input_grad[: len(INPUTS)]
    # With grad mode on (create_graph=True) the operator is there to say that it has no second
    # derivative.
    key = None if torch.is_grad_enabled() or not is_open() else signature(call, out, lse, dout, dlse)
    grads: Sequence[Tensor | None]
    if key is not None:
        grads = _fast_backward(key, call, ctx.backend, out, lse, dout, dlse, wanted)
    elif _inside_functorch():
        grads = _BackwardForFunctorch.apply(dout, dlse, out, lse, *call, ctx.backend, wanted)  # type: ignore[no-untyped-call]
    else:
        grads = _operators.rel_attention_backward(dout, dlse, out, lse, *call, ctx.backend, wanted)
    return [gradient if want else None for want, gradient in zip(wanted, grads, strict=True)]


def _fast_backward(
    key: Any, call: Call, backend: str, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Sequence[Tensor | None]:
    """key: the signature of the call and of what follows. They are checked again: `.data` can be
    set, and hooks can return anything, between forward and backward."""
    kernels = KERNELS[backend]
    prepared = _known.get((key, backend))
    if prepared is None:
        checked(call, backend, True)
        given = dout, dlse
        dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
        prepared = _remember((key, backend))
        prepared.as_given = dout is given[0] and dlse is given[1]
    else:
        checks.check_seed(call.seed, call.q, "seed")
        if kernels.READS_BOUNDS:
            checks.check_bound_values(call)
        if not prepared.as_given:
            dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
    return kernels.backward(call, out, lse, dout, dlse, wanted, prepared)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "rel_attention: this backend has no second derivative; call rel_attention(..., backend='reference')"
    )


_derivatives = _Derivatives("txl_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]
torch.library.register_autograd(
    "txl_kernels::rel_attention", _gradients, setup_context=_setup_context, lib=_derivatives
)
torch.library.register_autograd("txl_kernels::rel_attention_backward", _no_second_derivative, lib=_derivatives)


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """The operator's rule for vmap: a call for each."""

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


for _name in ("rel_attention", "rel_attention_backward"):
    torch.library.register_vmap(f"txl_kernels::{_name}", _one_by_one(getattr(_operators, _name).default), lib=_library)


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
        """Nothing to keep: there is no second derivative."""


class _FastPath(torch.autograd.Function):
    """The operator's autograd without the operator. Takes the call's inputs, for their gradients,
    and (call, backend, prepared, need_lse)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call, backend, prepared, need_lse = args[-1]
        out, lse = KERNELS[backend].forward(call, prepared)
        _keep(ctx, call, backend, out, lse)
        return (out, lse) if need_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return (*_input_gradients(ctx, dout, dlse), None)


# Function.apply itself only asks for functorch, which `is_open` and `signature` have done.
_run_fast_path: Any = super(torch.autograd.Function, _FastPath).apply
