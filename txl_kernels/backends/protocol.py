"""The protocol of a backend, and questions that several backends ask of a device.

Modules implement it: their functions are its methods, their constants its attributes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from txl_kernels.call import ALL, Call, Wanted


@dataclasses.dataclass(slots=True)
class Prepared:
    """The record kept between calls of one signature: the same shapes, strides, dtypes and
    settings.

    Attributes:
        always: the backend that runs every such call, by what was asked for (None or a name).
        chosen: the backend by (asked for, gradients wanted, tensors begin where 16 bytes can be
            read), where that decides.
        checked: (backend, gradients) of calls of the operators that were checked.
        plans: of the C++ and CUDA modules, by kernels: the call without its pointers.
        as_given: of a backward: kernels read dout and dlse as they come.
    """

    always: dict[str | None, str] = dataclasses.field(default_factory=dict)
    chosen: dict[tuple[str | None, bool, bool], str] = dataclasses.field(default_factory=dict)
    checked: set[tuple[str, bool]] = dataclasses.field(default_factory=set)
    plans: dict[str, Any] = dataclasses.field(default_factory=dict)
    as_given: bool = False


class HeadWidths(NamedTuple):
    """Head widths D that a backend takes."""

    multiple_of: int = 1
    maximum: int | None = None


class Backend(Protocol):
    """A way to compute a checked call."""

    @property
    def NAME(self) -> str: ...

    @property
    def DTYPES(self) -> tuple[torch.dtype, ...] | None:
        """None: every floating dtype."""

    @property
    def HEAD_WIDTHS(self) -> HeadWidths: ...

    @property
    def READS_BOUNDS(self) -> bool:
        """Whether values of `start` and `end` are read and checked before it runs.

        Where reading them would mean waiting for a device, kernels give NaN to a query whose own
        are out of range.
        """

    def why_not_tensors(self, device: torch.device, dtype: torch.dtype, head_width: int = 64) -> str | None:
        """Why it cannot take tensors of this device, dtype and head width; None if it can."""

    def why_not_call(self, call: Call) -> str | None:
        """Why it does not take this call of tensors that it could take; None if it does."""

    def forward(
        self, call: Call, prepared: Prepared | None = None, need_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """(out [B, H, L, D of v] in q's dtype, lse [B, H, L]) of a checked call; lse may be None
        where it is not needed."""


class Kernels(Backend, Protocol):
    """A backend behind the operators: out has q's strides where q is dense, lse is float32,
    gradients are its own."""

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
        """Gradients of the call's inputs, in their order; None or empty where there is no input or
        none is wanted."""


def _join(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def why_not_dtype(
    name: str, dtypes: tuple[torch.dtype, ...], widths: HeadWidths, dtype: torch.dtype, head_width: int
) -> str | None:
    """Why a backend of these dtypes and widths does not take tensors of this dtype and head width;
    None if it does."""
    if dtype not in dtypes:
        short = [str(x).removeprefix("torch.") for x in (*dtypes, dtype)]
        return f"{name} takes {_join(short[:-1])}, not {short[-1]}"
    too_wide = widths.maximum is not None and head_width > widths.maximum
    if too_wide or head_width % widths.multiple_of:
        multiples = f" that are multiples of {widths.multiple_of}" if widths.multiple_of > 1 else ""
        return f"{name} takes head widths{multiples} up to {widths.maximum}, not {head_width}"
    return None


@functools.cache
def why_not_gpu(device: torch.device) -> str | None:
    """Why kernels for NVIDIA GPUs from sm_80 on do not run on a CUDA device; None if they do."""
    if torch.version.hip is not None:
        return "ROCm is refused: the kernels are for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"a GPU of compute capability 8.0 or newer is needed, {device} has {major}.{minor}"
