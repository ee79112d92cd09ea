"""The backends, and which of them runs a call. Only `backend=None` may choose; one asked for by
name runs or says why it cannot."""

import functools
import warnings

import torch

from txl_kernels.backends import cpu, cuda, reference, self_check, triton
from txl_kernels.backends.protocol import Backend, Kernels, Plans
from txl_kernels.call import Call, inputs_of, needs_gradients

# Fastest first.
KERNELS: dict[str, Kernels] = {cpu.NAME: cpu, cuda.NAME: cuda, triton.NAME: triton}
BACKENDS: dict[str, Backend] = {**KERNELS, reference.NAME: reference}
ALIGNMENT = cuda.ROW_BYTES
# Dtypes in which kernels can be expected on a device, so that falling back to the reference is
# worth a warning.
_EXPECTED = {
    "cpu": (cpu, (torch.float32, torch.bfloat16, torch.float16)),
    "cuda": (triton, triton.DTYPES),
}


def available_backends(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, head_width: int = 64
) -> list[str]:
    """Names of the backends that run on `device` with `dtype`, fastest first.

    "cuda" among them takes calls of few queries without gradients, on an H100 in 16-bit types any,
    and for now only by name; the others take any.
    """
    device = torch.device(device)
    return [name for name, backend in BACKENDS.items() if backend.cannot_run(device, dtype, head_width) is None]


def check_name(backend: str | None) -> None:
    """Raises TypeError or ValueError for what is neither None nor the name of a backend."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or one of {', '.join(BACKENDS)}, got {type(backend).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")


def choose(backend: str | None, call: Call) -> str:
    """The name of the backend for a call; both have been checked.

    Raises:
        RuntimeError: it cannot run on this device, dtype or head width, or does not take this call,
            with the reason.
    """
    if backend is None:
        name = choose_unasked(call.q.device, call.q.dtype, call.q.shape[-1], call)
        if name == reference.NAME:
            _warn_of_reference(call)
        return name
    chosen = BACKENDS[backend]
    reason = chosen.cannot_run(call.q.device, call.q.dtype, call.q.shape[-1]) or chosen.refuses(call)
    reason = reason or _disagrees(backend, call)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend


def choose_once(backend: str | None, call: Call, plans: Plans | None) -> str:
    """`choose`, remembered by what else decides among calls of one signature, whose plans these
    are: nothing for the CPU's kernels; for others whether gradients are wanted, and whether tensors
    begin where 16 bytes can be read."""
    if plans is None:
        return choose(backend, call)
    name: str | None = plans.get(("chosen", backend))
    if name is not None:
        return name
    aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in inputs_of(call))
    key = ("chosen", backend, needs_gradients(call), aligned)
    name = plans.get(key)
    if name is None:
        name = choose(backend, call)
        if name == cpu.NAME:
            plans["chosen", backend] = name
        elif name not in KERNELS or self_check.is_settled(self_check.kind_of(name, call)):
            plans[key] = name
    return name


def choose_unasked(device: torch.device, dtype: torch.dtype, head_width: int = 64, call: Call | None = None) -> str:
    """What backend=None takes for a call, or, without one, for long calls that need gradients."""
    return next(name for name in BACKENDS if _unasked(name, device, dtype, head_width, call))


def _unasked(name: str, device: torch.device, dtype: torch.dtype, head_width: int, call: Call | None) -> bool:
    """Whether backend=None may take it; call: None for one that any backend takes."""
    backend = BACKENDS[name]
    if backend.cannot_run(device, dtype, head_width) is not None or (name == cuda.NAME and not _cuda_unasked(call)):
        return False
    if call is None:
        return True
    if backend.refuses(call) is not None:
        return False
    wrong = _disagrees(name, call)
    if wrong is not None:
        _warn_once(device.type, f"backend={name!r} is left out: {wrong}")
    return wrong is None


def _disagrees(name: str, call: Call) -> str | None:
    """What a small case on a GPU shows of a backend; None: nothing."""
    compiling = torch.compiler.is_compiling()
    if name not in KERNELS or (not compiling and call.q.numel() == 0):
        return None
    # One graph is for all lengths: none is asked for there.
    kinds = self_check.all_kinds_of(name, call) if compiling else (self_check.kind_of(name, call),)
    for kind in kinds:
        wrong = self_check.disagrees(KERNELS[name], kind)
        if wrong is not None:
            return f"{wrong}. {self_check.SETTING}=off runs it nevertheless"
    return None


def _cuda_unasked(call: Call | None) -> bool:
    """Whether a device has shown that it is right and faster for such a call."""
    if call is None or not (cuda.VERIFIED or cuda.HOPPER_VERIFIED):
        return False
    if call.q.size(2) > cuda.MOST_QUERIES or needs_gradients(call):
        return cuda.HOPPER_VERIFIED
    return cuda.VERIFIED and call.q.size(2) <= cuda.FASTER_UP_TO


def _warn_of_reference(call: Call) -> None:
    device, dtype = call.q.device, call.q.dtype
    kernels, dtypes = _EXPECTED.get(device.type, (None, ()))
    if kernels is not None and dtype in dtypes:
        reason = kernels.cannot_run(device, dtype, call.q.shape[-1]) or kernels.refuses(call)
        if reason is not None:  # else they were left out, which was said
            _warn(device.type, reason)


def _warn(device: str, reason: str) -> None:
    _warn_once(device, reason)


# torch.compile warns while it traces.
setattr(_warn, "_dynamo_marked_constant", True)  # noqa: B010


@functools.cache
def _warn_once(device: str, reason: str) -> None:
    warnings.warn(
        f"txl_kernels uses the slow reference backend on the {device}: {reason}. Run `python -m txl_kernels` for details.",
        RuntimeWarning,
        stacklevel=7,
    )
