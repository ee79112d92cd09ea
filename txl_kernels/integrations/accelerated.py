"""What all accelerated modules share: when the original runs instead, and how that is counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from txl_kernels.backends import KERNELS

STATE = "_txl_kernels"  # of a module, an attribute beside its own


class Accelerated:
    """Base of adapters, left of the original class.

    Attributes:
        original: the class that the module had.
    """

    original: ClassVar[type]
    peer: ClassVar[Any]

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """What calls need to know of the modules above, outermost first; see `setting`."""
        return {}

    @property
    def fallbacks(self) -> "Counter[str]":
        """How often the original ran, by reason."""
        counts: Counter[str] = self.__dict__[STATE]["fallbacks"]
        return counts

    def fall_back(self, why: str, *args: Any, **kwargs: Any) -> Any:
        """The original's result, counted."""
        self.count(why)
        return self.original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    def count(self, why: str) -> None:
        """One more call that the original answers; none is counted while compiling."""
        if not torch.compiler.is_compiling():
            self.fallbacks[why] += 1

    def reader_of_weights(self: Any) -> str | None:
        """Of a class that stores its weights: who may read them after a call, or None."""
        return "a forward hook, which may read the weights that the original stores" if self._forward_hooks else None

    def setting(self, name: str) -> Any:
        """What `accelerate` was told, or found above the module."""
        return self.__dict__[STATE].get(name)

    def hindrance(self, x: Tensor, dropout_p: float = 0.0) -> str | None:
        """Why no kernel takes tensors like x and this dropout now, or None."""
        if dropout_p >= 1:
            return "everything is dropped"
        if torch._C._get_tracing_state() is not None or torch.onnx.is_in_onnx_export():
            return "traced or exported to ONNX"
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        return None if has_kernel(x.device, dtype) else f"no kernel for {dtype} on {x.device.type}"


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel takes tensors of such a device and dtype, of some head width."""
    return any(kernels.cannot_run(device, dtype) is None for name, kernels in KERNELS.items() if name != "cuda")


def new_state(**settings: Any) -> dict[str, Any]:
    """Of a module that is about to be accelerated."""
    return {"fallbacks": Counter(), **settings}
