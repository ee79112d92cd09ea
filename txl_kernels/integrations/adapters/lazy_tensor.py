"""An object in place of a tensor that the kernels do not need, such as one of all pairs of queries
and keys. It is computed when something else needs it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rmatmul", "neg", "abs",
    "lt", "le", "gt", "ge", "eq", "ne", "invert", "and", "or", "len", "iter", "bool", "float",
)  # fmt: skip


class LazyTensor:
    """An object that stands for a tensor. Everything that a tensor has or takes part in gets the
    tensor itself, but for what subclasses define."""

    def __init__(self, compute: Callable[[], Tensor], device: torch.device, source: Any = None) -> None:
        """compute: returns the tensor, and counts that. device: that of the tensor. source: what
        adapters read in its place."""
        self._compute = compute
        self._device = device
        self.source = source
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """Return the tensor, which is computed once."""
        if self._tensor is None:
            self._tensor = self._compute()
        return self._tensor

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself where only its own device is asked for, as Hugging Face's accelerate does
        with every output."""
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is None and memory_format is None and device == self._device:
            return self
        return self.tensor().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_as_tensors(args), **_as_tensors(kwargs or {}))


def _as_tensors(x: Any) -> Any:
    """Return arguments of a function of torch with tensors in place of the objects."""
    if type(x) in (list, tuple):
        return type(x)(_as_tensors(y) for y in x)
    if isinstance(x, dict):
        return {name: _as_tensors(y) for name, y in x.items()}
    return x.tensor() if isinstance(x, LazyTensor) else x


def _of_tensor(name: str) -> Callable[..., Any]:
    def method(self: LazyTensor, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*args)

    return method


for _name in _OPERATORS:
    setattr(LazyTensor, f"__{_name}__", _of_tensor(f"__{_name}__"))
