"""Which backend runs a call. Only `backend=None` may choose; one asked for by name runs or says why it cannot."""

import functools
import warnings
from types import ModuleType

import torch

from txl_kernels import cuda, native, reference, triton
from txl_kernels.call import Call

# Each module has cannot_run(device, dtype, head_width) -> reason or None, and may have refuses(call) -> reason or None.
# Fastest first.
BACKENDS: dict[str, ModuleType] = {"native": native, "cuda": cuda, "triton": triton, "reference": reference}
# Where kernels can be expected, so that falling back to the reference is worth a warning.
_EXPECTED = {("cpu", dtype): "native" for dtype in native.DTYPES} | {
    ("cuda", dtype): "triton" for dtype in triton.DTYPES
}


def cannot_run(name: str, device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Why the named backend cannot take such tensors; None if it can."""
    reason: str | None = BACKENDS[name].cannot_run(device, dtype, head_width)
    return reason


def refuses(name: str, call: Call) -> str | None:
    """Why a backend that can run such tensors does not take this call; None if it does."""
    check = getattr(BACKENDS[name], "refuses", None)
    reason: str | None = None if check is None else check(call)
    return reason


def available_backends(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, head_width: int = 64
) -> list[str]:
    """Names of the backends that run on `device` with `dtype`, fastest first.

    "cuda" among them takes calls of few queries and no gradients, and for now only by name; the others take any.
    """
    return [name for name in BACKENDS if cannot_run(name, torch.device(device), dtype, head_width) is None]


@functools.cache
def _warn_of_reference(device: str, reason: str) -> None:
    warnings.warn(
        f"txl_kernels uses the slow reference backend on the {device}: {reason}. Run `python -m txl_kernels` for details.",
        RuntimeWarning,
        stacklevel=4,
    )


def _unasked(name: str, device: torch.device, dtype: torch.dtype, head_width: int, call: Call | None) -> bool:
    """Whether backend=None may take it; call: None for one that any backend takes."""
    if name == "cuda" and (not cuda.VERIFIED or call is None or call.q.size(2) > cuda.FASTER_UP_TO):
        return False
    return cannot_run(name, device, dtype, head_width) is None and (call is None or refuses(name, call) is None)


def choose_unasked(device: torch.device, dtype: torch.dtype, head_width: int = 64, call: Call | None = None) -> str:
    """What backend=None takes for a call, or, without one, for long calls that need gradients."""
    return next(name for name in BACKENDS if _unasked(name, device, dtype, head_width, call))


def choose(backend: str | None, call: Call) -> str:
    """The name of the backend for a checked call.

    Raises:
        ValueError: `backend` is not a known name.
        RuntimeError: it cannot run on this device, dtype or head width, or does not take this call, with the reason.
    """
    device, dtype, head_width = call.q.device, call.q.dtype, call.q.shape[-1]
    if backend is None:
        name = choose_unasked(device, dtype, head_width, call)
        if name == "reference" and (device.type, dtype) in _EXPECTED:
            kernels = _EXPECTED[device.type, dtype]
            _warn_of_reference(device.type, str(cannot_run(kernels, device, dtype, head_width)))
        return name
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = cannot_run(backend, device, dtype, head_width)
    if reason is None:
        reason = refuses(backend, call)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend
