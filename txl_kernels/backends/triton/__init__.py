"""The `triton` backend: NVIDIA GPUs from sm_80 on and AMD GPUs of CDNA 2 to 4 and RDNA 3 and 4, in
float32, bfloat16 and float16, with head widths up to 256.

Kernels are compiled at the first call for a dtype and head width. With TRITON_INTERPRET=1 they run
on the CPU in Triton's interpreter, slowly; tests without a GPU use it. Triton itself is imported at
the first call.
"""

import functools
import importlib
import re
from typing import Any

import torch
from torch import Tensor

from txl_kernels.backends.limits import TRITON
from txl_kernels.backends.protocol import Prepared, architecture, platform, why_not_dtype, why_not_gpu
from txl_kernels.backends.triton.config import interpreted as interpreted
from txl_kernels.backends.triton.config import why_not_capability
from txl_kernels.call import ALL, Call, Wanted
from txl_kernels.torch_state import constant_when_traced

NAME = "triton"
LIMITS = TRITON
READS_BOUNDS = False
# The oldest Triton that compiles gathers of rank 1, and float32 through descriptors, as the kernels
# need.
OLDEST_TRITON = (3, 6)
OLDEST_TORCH = (2, 10)  # the oldest torch that brings it


@functools.cache
def why_not_loaded() -> str | None:
    """Return the reason why Triton cannot be used, or None."""
    try:
        found = version()
    except ModuleNotFoundError as error:
        if error.name != NAME:
            return f"triton cannot be imported: {error}"
        if torch.version.hip is not None:  # PyPI's torch, which pip would take, is NVIDIA's
            return "the triton package is not installed: it comes with torch's wheels for ROCm"
        return f'the triton package is not installed: pip install "txl-kernels[gpu]"{_too_old_a_torch()}'
    except Exception as error:  # a library that does not load, for example
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    if parse_version(found) < OLDEST_TRITON:
        return (
            f"triton {'.'.join(map(str, OLDEST_TRITON))} or newer is needed, {found or 'a module without a version'} is "
            f"installed; torch {'.'.join(map(str, OLDEST_TORCH))} is the oldest that brings it, this is torch "
            f"{torch.__version__}"
        )
    return None


def version() -> str:
    """Return Triton's version, or "" if the module has none. Its distribution has several names:
    triton, pytorch-triton (nightly builds), triton-windows.

    Raises:
        ImportError: Triton is not installed, or does not load.
    """
    return str(getattr(importlib.import_module(NAME), "__version__", ""))


def parse_version(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def _too_old_a_torch() -> str:
    if parse_version(torch.__version__) >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f", with torch {oldest} or newer, the oldest that brings Triton {'.'.join(map(str, OLDEST_TRITON))}"


def why_not_tensors(device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
    """Return the reason why the backend cannot run with tensors of this device, dtype and head
    width, or None."""
    reason: str | None = why_not_dtype(NAME, LIMITS, dtype, head_width) or _why_not_device(device)
    return reason


@constant_when_traced
def _why_not_device(device: torch.device) -> str | None:
    """Return the reason why the kernels do not run on a device at all, or None."""
    on_cpu = interpreted()
    if device.type != ("cpu" if on_cpu else "cuda"):
        if on_cpu:
            return f"TRITON_INTERPRET=1 runs kernels on the cpu, not on {device.type}"
        return f"triton runs on {platform()} devices, not on {device.type} (but for tests with TRITON_INTERPRET=1)"
    reason = why_not_loaded() or (None if on_cpu else why_not_gpu(device))
    if reason is None and not on_cpu:
        reason = why_not_capability(architecture(device), parse_version(version()))
    return reason


@functools.cache
def _passes() -> Any:
    return importlib.import_module("txl_kernels.backends.triton.passes")


def forward(call: Call, prepared: Prepared | None = None, need_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, L, D of v], lse float32 [B, H, L]). out has q's strides if q is dense.

    prepared, need_lse: not used.
    """
    result: tuple[Tensor, Tensor] = _passes().forward(call)
    return result


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted = ALL,
    prepared: Prepared | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the call's inputs, in their order; None where there is no input or
    its gradient is not wanted. All gradients are computed."""
    result: tuple[Tensor | None, ...] = _passes().backward(call, out, lse, dout, dlse, wanted)
    return result
