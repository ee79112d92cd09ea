"""The operators in torch.library: schemas, fakes, and what runs when the dispatcher calls them.

`txl_kernels::rel_attention` and `txl_kernels::rel_attention_backward` take the fields of `Call` and
a backend's name; backward also `output_mask`, which of the gradients are wanted (None: all). Anyone
can call them, so they check what `rel_attention` has checked already.
"""

from typing import Any

import torch
from torch import Tensor

from txl_kernels import checks
from txl_kernels.backends import KERNELS
from txl_kernels.backends.protocol import Kernels, Plans
from txl_kernels.call import Call
from txl_kernels.call.fields import ALL, INPUTS, Wanted, empty_gradients, empty_like_rows
from txl_kernels.operators import fast_path

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?", float: "float",
}  # fmt: skip
_FIELDS = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in Call.__annotations__.items())
_GRADIENTS = ", ".join(["Tensor"] * 8)
_CHECKED = "checked: "  # the key of plans under which a backend's own checks are remembered

_library = torch.library.Library("txl_kernels", "DEF")
_library.define(f"rel_attention({_FIELDS}, str backend) -> (Tensor, Tensor)")
_library.define(
    "rel_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_FIELDS}, str backend, bool[8]? output_mask=None) -> ({_GRADIENTS})"
)


def checked(call: Call, backend: str) -> tuple[Kernels, Plans | None]:
    """The kernels for a call that anyone may have made, and what `fast_path.check` returned for it.

    Raises:
        TypeError, ValueError: an argument, as `rel_attention` would say.
        RuntimeError: the backend cannot run here or does not take the call, with the reason.
    """
    if backend not in KERNELS:
        raise ValueError(f"backend must be one of {', '.join(KERNELS)}, got {backend!r}")
    kernels = KERNELS[backend]
    plans = fast_path.known(call)
    if plans is None or _CHECKED + backend not in plans:
        plans = _check(kernels, call)
        if plans is not None:
            plans[_CHECKED + backend] = True
    if kernels.READS_BOUNDS:
        checks.check_bound_values(call)
    return kernels, plans


def _check(kernels: Kernels, call: Call) -> Plans | None:
    """All of `checked` that a call's signature decides."""
    reason = kernels.cannot_run(call.q.device, call.q.dtype, call.q.size(-1) if call.q.dim() else 1)
    if reason is not None:
        raise RuntimeError(reason)
    plans = fast_path.check(call)
    if call.seed is None and call.dropout_p > 0:
        raise TypeError("seed must be an int64 tensor of one element where dropout_p > 0, got None")
    checks.check_seed(call.seed, call.q, "seed")
    reason = kernels.refuses(call)
    if reason is not None:
        raise RuntimeError(reason)
    return plans


def _forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    *fields, backend = arguments
    call = Call(*fields)
    kernels, _ = checked(call, backend)
    return kernels.forward(call)


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, backend, wanted = _parts(arguments)
    kernels, _ = checked(call, backend)
    dout, dlse = checks.check_gradients(call, out, lse, dout, dlse)
    return kernels.backward(call, out, lse, dout, dlse, wanted)


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
def _forward_fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("txl_kernels::rel_attention_backward")
def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, _, wanted = _parts(arguments)
    return empty_gradients(call, wanted)
