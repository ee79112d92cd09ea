"""The backends, and the choice of the one that runs a call. Only `backend=None` chooses; a backend
that is named runs the call or raises with the reason."""

import functools
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from txl_kernels.backends import cpu, cuda, reference, route, self_check, triton
from txl_kernels.backends.limits import PREFILL
from txl_kernels.backends.protocol import Backend, Kernels
from txl_kernels.call import Call
from txl_kernels.torch_state import constant_when_traced

# Fastest first.
KERNELS: dict[str, Kernels] = {cpu.NAME: cpu, cuda.NAME: cuda, triton.NAME: triton}
BACKENDS: dict[str, Backend] = {**KERNELS, reference.NAME: reference}
_warning = threading.Lock()
_PACKAGE = str(Path(__file__).parents[1])
# Dtypes that the kernels of a device support, so that falling back to the reference is worth a
# warning.
_EXPECTED = {
    "cpu": (cpu, (torch.float32, torch.bfloat16, torch.float16)),
    "cuda": (triton, triton.LIMITS.dtypes),
}


def available_backends(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, head_width: int = 64
) -> list[str]:
    """Return the names of the backends that run on `device` with `dtype`, fastest first.

    "cuda" supports decode calls (at most 16 queries) without gradients, and on an H100 or H200 most
    calls in 16-bit types up to width 128. The other backends support any call.
    """
    device = torch.device(device)
    return [name for name, backend in BACKENDS.items() if backend.why_not_tensors(device, dtype, head_width) is None]


def check_name(backend: str | None) -> None:
    """Check that `backend` is None or the name of a backend.

    Raises:
        TypeError, ValueError: it is not.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or one of {', '.join(BACKENDS)}, got {type(backend).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")


def choose(backend: str | None, call: Call) -> str:
    """Return the name of the backend that runs a checked call.

    Raises:
        TypeError, ValueError: backend is neither None nor a name.
        RuntimeError: the named backend cannot run on this device, dtype or head width, does not
            support the call, or failed at the first call of this kind; the message says why.
    """
    check_name(backend)
    if backend is None:
        return _first_that_runs(call)
    chosen = BACKENDS[backend]
    reason = chosen.why_not_tensors(call.q.device, call.q.dtype, call.q.shape[-1])
    reason = reason or route.why_not_call(backend, call) or why_not_kind(backend, call)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend


def choose_unasked(
    device: torch.device, dtype: torch.dtype, head_width: int = 64, *, decode: bool = False, gradients: bool = True
) -> str:
    """Return the backend that backend=None chooses for decode (at most 16 queries) or prefill, with
    or without gradients. On a GPU the first choice for a kind of call runs the backend's
    self-check, which compiles kernels."""
    kind = self_check.Kind("", device, dtype, head_width, decode, gradients)
    call = self_check.on_device(self_check.case_of(kind), kind)
    call.q.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        return _first_that_runs(call, warns=False)


def _first_that_runs(call: Call, warns: bool = True) -> str:
    """Return the first backend that runs a call; the last one runs any.

    warns: True to warn once if a faster one is left out, with the reason.
    """
    left_out = None
    for name, backend in BACKENDS.items():
        if backend.why_not_tensors(call.q.device, call.q.dtype, call.q.shape[-1]) is not None:
            continue
        if not (route.is_preferred(call) if name == cuda.NAME else route.why_not_call(name, call) is None):
            continue
        reason = why_not_kind(name, call)
        if reason is None:
            break
        left_out = f"backend={name!r} is left out: {reason}"
    if left_out is None and name == reference.NAME:
        left_out = _why_not_kernels(call)
    if left_out is not None and warns:
        _warn(call.q.device.type, name, left_out)
    return name


def why_not_kind(name: str, call: Call, gradients: bool | None = None) -> str | None:
    """Return the reason why a backend that supports a call is left out for calls of its kind, as
    the self-check on a GPU found; None if its results agreed with the reference, or could not be
    checked.

    gradients: whether gradients will be needed; None to read it from the call.
    """
    if name not in KERNELS or not self_check.concerns(call.q.device):
        return None
    if torch.compiler.is_compiling():  # one graph serves all lengths, so no length is compared
        kinds = [self_check.kind_of(name, call, gradients, decode) for decode in (False, True)]
        if name == cuda.NAME:
            by_prefill = route.why_not(call, PREFILL, sizes=False) is None
            kinds = [x for x in kinds if by_prefill or (x.decode and not x.gradients)]
        for kind in kinds:  # torch.compile of torch 2.6 does not follow `next` with a default
            reason = _why_not(True, *kind)
            if reason is not None:
                return reason
        return None
    return None if call.q.numel() == 0 else _why_not(False, *self_check.kind_of(name, call, gradients))


@constant_when_traced
def _why_not(is_traced: bool, *kind: Any) -> str | None:
    """Return `self_check.why_not_trusted` of the kind with these fields.

    While a call is traced, an exception would reach the user as the compiler's. It is dropped, and
    raised again when the graph first runs.
    """
    name: str = kind[0]
    try:
        reason: str | None = self_check.why_not_trusted(KERNELS[name], self_check.Kind(*kind))
    except Exception:
        if not is_traced:
            raise
        reason = None
    return reason


def _why_not_kernels(call: Call) -> str | None:
    """Return the reason why kernels that exist for the device and dtype do not run the call; None
    if there are none."""
    kernels, dtypes = _EXPECTED.get(call.q.device.type, (None, ()))
    if kernels is None or call.q.dtype not in dtypes:
        return None
    reason: str | None = kernels.why_not_tensors(call.q.device, call.q.dtype, call.q.shape[-1])
    return reason or route.why_not_call(kernels.NAME, call)


@constant_when_traced
def _warn(device: str, name: str, reason: str) -> None:
    """Warn once for each device, backend that is used instead and reason, at the line that called
    the package."""
    with _warning:
        _warn_once(device, name, reason)


@functools.cache
def _warn_once(device: str, name: str, reason: str) -> None:
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    used = "the slow reference backend" if name == reference.NAME else f"backend={name!r}"
    warnings.warn(
        f"txl_kernels uses {used} on the {device}: {reason}. Run `python -m txl_kernels` for details.",
        RuntimeWarning,
        stacklevel=level,
    )
