"""The preparation of a call: its checks, the choice of the backend that runs it, that backend's
self-check and its plan, once for all calls of one signature.

A signature is everything that decides whether a call is valid and what runs it, but the values in
its tensors, the seed, and the length M of the memory: as a cache grows, M differs at every call.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from txl_kernels import backends, checks, torch_state
from txl_kernels.backends import KERNELS, cpu, reference, self_check
from txl_kernels.backends.protocol import Prepared
from txl_kernels.call import (
    INPUTS,
    SETTINGS,
    Call,
    changed,
    inputs_of,
    is_bounded,
    needs_gradients,
    settings_of,
    tensors_of,
)

_SETTING_TYPES = (type(None), bool, int, float)
_MAX_SIGNATURES = 4096
_MAX_KEYS = 2**22  # no limit of a backend is below
_memo: dict[Any, Prepared] = {}  # by (signature, name of the backend or None, what for)


def prepare(call: Call, backend: str | None) -> tuple[Prepared, Call]:
    """Return the preparation of a call of `rel_attention`, whose tensors and settings have not been
    checked, with the given `backend`; and the call with settings of Python's own types. Not for a
    call that is traced.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        RuntimeError: the named backend cannot run the call; the message says why.
    """
    signed = signature(call)
    if signed is None and (plain := _with_plain_settings(call)) is not call:
        call, signed = plain, signature(plain)
    if backend is not None and type(backend) is not str:
        backends.check_name(backend)
        backend = str.__str__(backend)  # of a subclass, such as an enum's member
    key = (signed, backend, "call")
    prepared = _memo.get(key)
    if prepared is None:
        prepared = _prepared(backends.BACKENDS[choose(call, backend)], call, needs_gradients(call))
        prepared.is_ordinary = signed is not None
        if prepared.is_ordinary and _is_settled(prepared, call):
            _store(key, prepared)
    return prepared, call


def check_special(call: Call) -> None:
    """Check the tensors of a call that `composed` will rewrite, once for all calls of a signature.

    Raises:
        TypeError, ValueError: a tensor is wrong; the message names it.
    """
    signed = None if torch_state.is_traced() else signature(call)
    key = (signed, None, "special")
    if signed is None or key not in _memo:
        checks.check_tensors(call, special=True)
        if signed is not None:
            _store(key, Prepared(None, False))


def _with_plain_settings(call: Call) -> Call:
    """Return the call with numbers of other types (NumPy's) as int and float, which signatures
    and kernels know."""
    plain: dict[str, Any] = {}
    for name, x in zip(SETTINGS, settings_of(call), strict=True):
        if type(x) not in _SETTING_TYPES and isinstance(x, numbers.Real):
            plain[name] = int(x) if isinstance(x, numbers.Integral) else float(x)
    return changed(call, **plain) if plain else call


def choose(call: Call, backend: str | None) -> str:
    """Check a call and return the name of the backend that runs it, without a memo; errors as in
    `prepare`. torch.compile traces this function."""
    checks.check(call)
    checks.check_seed(call.seed, call.q)
    return backends.choose(backend, call)


def prepare_operator(call: Call, backend: str, gradients: bool) -> Prepared:
    """Return the preparation of a call of an operator, which a user may have made directly.

    gradients: True for the backward operator.

    Raises:
        TypeError, ValueError: an argument is wrong, as in `rel_attention`.
        RuntimeError: the backend cannot run here, does not support the call, or failed at the first
            call of this kind; the message says why.
    """
    if backend not in KERNELS:
        raise ValueError(f"backend must be one of {', '.join(KERNELS)}, got {backend!r}")
    signed = None if torch_state.is_traced() else signature(call)
    key = (signed, backend, gradients)
    prepared = _memo.get(key)
    if prepared is None:
        kernels = KERNELS[backend]
        reason = kernels.why_not_tensors(call.q.device, call.q.dtype, call.q.size(-1) if call.q.dim() else 1)
        if reason is not None:
            raise RuntimeError(reason)
        checks.check(call)
        _check_operator_seed(call)
        reason = backends.route.why_not_call(backend, call) or backends.why_not_kind(backend, call, gradients)
        if reason is not None:
            raise RuntimeError(reason)
        prepared = _prepared(kernels, call, gradients)
        if signed is not None and _is_settled(prepared, call):
            _store(key, prepared)
    else:
        _check_operator_seed(call)
    if prepared.reads_bounds and not prepared.kernels.bounds_fit(call, prepared):
        checks.check_bound_values(call)
    return prepared


def prepare_backward(
    call: Call, backend: str, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Prepared, Tensor, Tensor | None] | None:
    """Return the preparation of backward with dout and dlse as its kernels read them; None if a
    tensor is not ordinary.

    Forward's checks do not hold here: between forward and backward `.data` can be set, and hooks
    can return any tensor.
    """
    signed = signature(call, out, lse, dout, dlse)
    if signed is None:
        return None
    key = (signed, backend, "backward")
    prepared = _memo.get(key)
    if prepared is None:
        prepare_operator(call, backend, True)
        given = dout, dlse
        dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
        prepared = _prepared(KERNELS[backend], call, True)
        prepared.as_given = dout is given[0] and dlse is given[1]
        _store(key, prepared)
        return prepared, dout, dlse
    if call.seed is not None:
        checks.check_seed(call.seed, call.q, "seed")
    if prepared.reads_bounds and not prepared.kernels.bounds_fit(call, prepared):
        checks.check_bound_values(call)
    if not prepared.as_given:
        dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
    return prepared, dout, dlse


def _check_operator_seed(call: Call) -> None:
    if call.seed is None and call.dropout_p > 0:
        raise TypeError("seed must be an int64 tensor of one element where dropout_p > 0, got None")
    checks.check_seed(call.seed, call.q, "seed")


def _prepared(kernels: Any, call: Call, gradients: bool) -> Prepared:
    return Prepared(kernels, gradients, reads_bounds=kernels.READS_BOUNDS and is_bounded(call))


def _is_settled(prepared: Prepared, call: Call) -> bool:
    """Whether later calls of the signature will get the same backend."""
    name = prepared.kernels.NAME
    if name in (cpu.NAME, reference.NAME):
        return True
    return self_check.is_settled(self_check.kind_of(name, call, prepared.gradients))


def _store(key: Any, prepared: Prepared) -> None:
    if len(_memo) >= _MAX_SIGNATURES:
        _memo.clear()
    _memo[key] = prepared


def signature(call: Call, *others: Tensor | None) -> Any:
    """Return a hashable key: the signature of a call; None if a tensor is not ordinary.

    It holds, for each tensor but the seed, dtype, device, sizes and strides; every setting with its
    type; whether all inputs are aligned to 16 bytes; whether gradients are needed and enabled, and
    algorithms must be deterministic. Of M it holds only whether it is 0, whether k_mem and v_mem
    have the same, and whether the table has a row for the distance of the first visible key. Where
    gradients are needed, others are given, or M + L is above `_MAX_KEYS`, it holds M itself:
    gradients of the memory have its shape, and limits of backends are that large.

    The C++ module computes the key in about 1 us, Python in about 10 us.

    others: tensors that the key includes beside the call's.
    """
    if not torch_state.AVAILABLE:
        return None
    state = int(torch.is_grad_enabled()) + 2 * int(torch_state.is_deterministic())
    if cpu.native.module is not None:
        return cpu.native.module.signature(call, torch_state.ORDINARY, others, state)
    *tensors, _ = tensors_of(call)
    settings = settings_of(call)
    if not torch_state.ordinary(*tensors, *others) or not all(type(x) in _SETTING_TYPES for x in settings):
        return None
    gradients = needs_gradients(call)
    memory = None if gradients or others else _memory_signature(call)
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in inputs_of(call))
    key: list[Any] = [memory, gradients, aligned, state]
    for n, x in enumerate((*tensors, *others)):
        is_memory = n < len(INPUTS) and INPUTS[n] in ("k_mem", "v_mem")
        key.append(None if x is None else (x.dtype, x.device, _sizes(x, memory is None or not is_memory), x.stride()))
    return (*key, *((type(x), x) for x in settings))  # True == 1 == 1.0, but not all of them are valid


def _sizes(x: Tensor, with_rows: bool) -> Sequence[int]:
    """Return a tensor's sizes, or all but that of its last axis but one."""
    return x.shape if with_rows else (*x.shape[:-2], *x.shape[-1:])


def _memory_signature(call: Call) -> Any:
    """Return what a signature holds of M; None if it must hold M itself."""
    q, k_mem, v_mem = call.q, call.k_mem, call.v_mem
    table = call.r_bias if call.r is None else call.r
    if k_mem is None or v_mem is None or table is None or table.dim() < 2:
        return None
    if not q.dim() == k_mem.dim() == v_mem.dim() == 4 or k_mem.size(2) != v_mem.size(2):
        return None
    if type(call.zero_row) is not int or type(call.left) not in (int, type(None)):
        return None
    if k_mem.size(2) + q.size(2) > _MAX_KEYS or not 0 <= call.zero_row <= _MAX_KEYS:
        return None
    keys = k_mem.size(2) + q.size(2)
    farthest = keys - 1 if call.left is None else min(keys - 1, call.left)
    return k_mem.size(2) == 0, farthest + call.zero_row < table.size(1)
