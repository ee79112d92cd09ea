"""The protocol of a backend, and reasons why a device or dtype is refused that several backends
share.

Backends are modules: their functions are the protocol's methods, their constants its attributes.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from txl_kernels.backends.limits import Limits
from txl_kernels.call import ALL, Call, Wanted

# AMD's architectures for which the kernels of Triton were compiled (tools/machine_code.py).
_AMD = re.compile(r"gfx(90a|942|950|110\d|120\d)")


@dataclasses.dataclass(slots=True)
class Prepared:
    """The preparation that calls of one signature share (see `txl_kernels.prepare`).

    Attributes:
        kernels: the backend that runs them.
        gradients: True if gradients will be needed.
        reads_bounds: True if the values of `start` or `end` must be checked before each call.
        as_given: in backward, True if the kernels read dout and dlse without a conversion.
        is_ordinary: True if the call's tensors are ordinary, so that kernels can run without the
            dispatcher.
        plan: what the backend keeps: the call without its pointers, or None.
    """

    kernels: Any
    gradients: bool
    reads_bounds: bool = False
    as_given: bool = False
    is_ordinary: bool = False
    plan: Any = None


class Backend(Protocol):
    """A backend: a way to compute a checked call."""

    @property
    def NAME(self) -> str: ...

    @property
    def LIMITS(self) -> Limits:
        """The limits of its kernels; of several kernels, of those with the widest dtypes and head
        widths."""

    @property
    def READS_BOUNDS(self) -> bool:
        """Whether the values of `start` and `end` are read and checked before the backend runs.
        Then it has a quick check of prepared calls, `bounds_fit(call, prepared) -> bool`.

        Backends that would have to synchronize with a device do not read them; their kernels return
        NaN for each query whose bounds are out of range.
        """

    def why_not_tensors(self, device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
        """Return the reason why the backend cannot run with tensors of this device, dtype and head
        width, or None."""

    def forward(
        self, call: Call, prepared: Prepared | None = None, need_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return (out [B, H, L, D of v] in q's dtype, lse [B, H, L]) of a checked call. lse may be
        None if `need_lse` is False."""


class Kernels(Backend, Protocol):
    """A backend that the operators call. out has q's strides if q is dense, lse is float32, and
    `backward` computes the gradients."""

    def backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        wanted: Wanted = ALL,
        prepared: Prepared | None = None,
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the call's inputs, in their order; None where there is no input
        or its gradient is not wanted."""


def _join(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def why_not_dtype(name: str, limits: Limits, dtype: torch.dtype, head_width: int) -> str | None:
    """Return the reason why a backend with these limits does not support this dtype and head width,
    or None."""
    if limits.dtypes and dtype not in limits.dtypes:
        short = [str(x).removeprefix("torch.") for x in (*limits.dtypes, dtype)]
        return f"{name} takes {_join(short[:-1])}, not {short[-1]}"
    too_wide = limits.width is not None and head_width > limits.width
    if too_wide or head_width % limits.multiple_of:
        multiples = f" that are multiples of {limits.multiple_of}" if limits.multiple_of > 1 else ""
        return f"{name} takes head widths{multiples} up to {limits.width}, not {head_width}"
    return None


def platform() -> str:
    """Return the name of the platform of GPUs that torch is built for, which calls all of them
    "cuda"."""
    return "CUDA" if torch.version.hip is None else "ROCm"


def architecture(device: torch.device) -> tuple[int, int] | str:
    """Return a GPU's compute capability, such as (9, 0); of an AMD GPU its architecture, such as
    "gfx942". (torch gives AMD's GPUs capabilities, too, which are no NVIDIA GPU's.)"""
    if torch.version.hip is None:
        return torch.cuda.get_device_capability(device)
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


@functools.cache
def why_not_gpu(device: torch.device) -> str | None:
    """Return the reason why Triton's kernels do not run on a CUDA or ROCm device, or None."""
    if not torch.cuda.is_available():
        return f"no {platform()} device is available"
    found = architecture(device)
    if isinstance(found, str):
        if _AMD.fullmatch(found):
            return None
        return f"of AMD's GPUs it takes gfx90a, gfx942, gfx950, gfx110x and gfx120x, {device} is a {found}"
    major, minor = found
    return None if major >= 8 else f"a GPU of compute capability 8.0 or newer is needed, {device} has {major}.{minor}"
