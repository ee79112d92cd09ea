"""Which backend runs a call. Only `backend=None` may choose; one asked for by name runs or says why it cannot."""

import functools
import warnings
from types import ModuleType

import torch

from txl_kernels import native, reference, triton

# Each module has cannot_run(device, dtype) -> reason or None. Fastest first.
BACKENDS: dict[str, ModuleType] = {"native": native, "triton": triton, "reference": reference}


def cannot_run(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the named backend cannot take such tensors; None if it can."""
    reason: str | None = BACKENDS[name].cannot_run(device, dtype)
    return reason


def available_backends(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the backends that run on `device` with `dtype`, the one `backend=None` takes first."""
    return [name for name in BACKENDS if cannot_run(name, torch.device(device), dtype) is None]


@functools.cache
def _warn_missing_native(reason: str) -> None:
    warnings.warn(
        f"txl_kernels uses the slow reference backend on the cpu: {reason}. Run `python -m txl_kernels` for details.",
        RuntimeWarning,
        stacklevel=4,
    )


def choose(backend: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The backend's name.

    Raises:
        ValueError: `backend` is not a known name.
        RuntimeError: it cannot run on this device or dtype, with the reason.
    """
    if backend is None:
        if device.type == "cpu" and dtype in native.DTYPES and native.module is None:
            _warn_missing_native(str(native.missing()))
        return available_backends(device, dtype)[0]
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = cannot_run(backend, device, dtype)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend
