"""The torch operators of a call, and a fast path for calls on which no torch feature depends.

`txl_kernels::rel_attention` and `txl_kernels::rel_attention_backward` take the fields of `Call` and
the name of a backend. Backward also takes `output_mask`, which selects the gradients to compute
(None: all). Users can call the operators directly, so they repeat the checks of `rel_attention`.

torch.library's Python path takes longer than a small kernel. Tracing, transforms, modes, profiling
and tensor subclasses need it. Without them the fast path gives the same results and the same
autograd graph, and checks calls of one signature only once.

The derivative is defined once, and registered in three ways: on the operators for tracers and
modes; in an autograd function with `setup_context` for torch.func.grad, which torch.library's own
functions do not support; and in one that skips the operators, for the fast path.
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
_known: dict[Any, Prepared] = {}  # by signature; for backward by (signature, backend)


def _find(path: str) -> Any:
    """Return torch.<path>, or None if this torch has no such private name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# Torch features that must see the operator: transforms, dispatch modes, tracers, profilers. Private
# names of torch tell which are active. If a version of torch lacks any of these names, every call
# goes through the dispatcher, which takes some microseconds more and is always correct.
_NAMES = (
    "_C._are_functorch_transforms_active", "_C._len_torch_dispatch_stack",
    "_ops._len_torch_dispatch_stack_pre_dispatch", "_C._is_tracing", "_C._autograd._profiler_enabled", "_C._has_storage",
    "autograd.forward_ad", "autograd.forward_ad._current_level", "Tensor._is_zerotensor",
)  # fmt: skip
_found = [_find(name) for name in _NAMES]
in_functorch, _modes, _pre_dispatch_modes, _tracing, _profiling, _has_storage, _forward_ad, *_ = _found
AVAILABLE = None not in _found


def is_plain() -> bool:
    """Whether no tracer, transform or dispatch mode is active.

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
    """Whether the fast path may be taken: no torch feature that must see operators is active,
    profilers included."""
    return is_plain() and not _profiling()


def ordinary(*tensors: Tensor | None) -> bool:
    """Whether all tensors are dense, of no subclass, and store their values in memory; None counts
    as ordinary."""
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
    """Return a hashable key of everything that decides whether a call is valid, except the values
    in its tensors; None if a tensor is not ordinary.

    Ordinary tensors are dense, of no subclass, and store their values in memory. Others are views
    that negate, zeros without memory, and the batches of torch.autograd.grad, which look like one
    tensor. The C++ module computes the key in about 1 us, Python in about 10 us.

    others: tensors that the key includes beside the call's.
    """
    if not AVAILABLE:
        return None
    if cpu.native.module is not None:
        return cpu.native.module.signature(call, _ORDINARY, others)
    *tensors, _ = tensors_of(call)  # the seed changes with every call
    settings = settings_of(call)
    if not ordinary(*tensors, *others) or not all(type(x) in _SETTING_TYPES for x in settings):
        return None
    forms = [None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in (*tensors, *others)]
    return (*forms, *((type(x), x) for x in settings))  # True == 1 == 1.0, but not all of them are valid


def _is_written_down() -> bool:
    """Whether a compiler or tracer follows the call, so that checks must not be skipped by what
    earlier calls have stored."""
    return torch.compiler.is_compiling() or (AVAILABLE and _tracing())


def _remember(key: Any) -> Prepared:
    if len(_known) >= _MAX_SIGNATURES:
        _known.clear()
    prepared = _known[key] = Prepared()
    return prepared


def check(call: Call) -> Prepared | None:
    """Run `checks.check` once for all calls of one signature. Return the record that these calls
    share, or None if the call is not ordinary.

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
    """A library whose autograd kernels raise for forward-mode AD. Those of register_autograd would
    drop the tangents of inputs that do not require gradients."""

    def impl(self, op_name: Any, fn: Any, *key: Any, **options: Any) -> None:
        super().impl(op_name, _without_tangents(fn), *key, **options)  # type: ignore[no-untyped-call]


def _without_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel with a check in front that raises if an argument has a tangent.

    torch's transforms unwrap tensors level by level, and only a kernel of the dispatch key Autograd
    sees the tangents of each level. The check takes 10 us for each tensor, so it is skipped where
    `is_plain()`.
    """

    def autograd(keyset: Any, *arguments: Any) -> Any:
        if not is_plain():
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
_library = torch.library.Library("txl_kernels", "DEF")
_library.define(f"rel_attention({_FIELDS}, str backend) -> (Tensor, Tensor)")
_library.define(
    "rel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_FIELDS}, str backend, bool[{len(INPUTS)}]? output_mask=None) -> ({_GRADIENTS})"
)


def checked(call: Call, backend: str, gradients: bool) -> Kernels:
    """Check a call of an operator, which a user may have made directly, and return its backend's
    kernels.

    gradients: True for the backward operator.

    Raises:
        TypeError, ValueError: an argument is wrong, as in `rel_attention`.
        RuntimeError: the backend cannot run here, does not support the call, or failed at the first
            call of this kind; the message says why.
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
    """Run the checks of `checked` that depend only on the call's signature."""
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
    return tuple(call.q.new_empty(0) if x is None else x for x in grads)  # separate tensors: outputs may not alias


def _parts(arguments: tuple[Any, ...]) -> tuple[Call, str, Wanted]:
    """Return the call, the backend's name and the mask of wanted gradients. The dispatcher omits an
    `output_mask` of None."""
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
    """Return (out, lse) of a checked call that the backend can run.

    prepared: the result of `check`.
    need_lse: False if lse may be None where no gradient needs it.
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
    # Without this private name, torch.func.grad raises torch's own error.
    return in_functorch is not None and not torch.compiler.is_compiling() and bool(in_functorch())


def _keep(ctx: Any, call: Call, backend: str, out: Tensor, lse: Tensor | None) -> None:
    ctx.settings, ctx.backend = settings_of(call), backend
    ctx.save_for_backward(*tensors_of(call), out, lse)
    ctx.set_materialize_grads(False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *fields, backend = inputs
    _keep(ctx, Call(*fields), backend, *output)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's arguments: the call's fields and the backend's
    name."""
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
    # With grad mode on (create_graph=True) the operator must be called: it raises the error that
    # there is no second derivative.
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
    """Run the backend's backward, with checks once for all calls of one signature.

    They are not those of forward: between forward and backward `.data` can be set, and hooks can
    return any tensor.

    key: the signature of the call with out, lse, dout and dlse.
    """
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
        """Save nothing: there is no second derivative."""


class _FastPath(torch.autograd.Function):
    """The operator's autograd function without the operator. Its arguments are the call's inputs,
    so that they get gradients, and (call, backend, prepared, need_lse)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        call, backend, prepared, need_lse = args[-1]
        out, lse = KERNELS[backend].forward(call, prepared)
        _keep(ctx, call, backend, out, lse)
        return (out, lse) if need_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return (*_input_gradients(ctx, dout, dlse), None)


# Function.apply would only check for functorch, which `is_open` and `signature` have done.
_run_fast_path: Any = super(torch.autograd.Function, _FastPath).apply
