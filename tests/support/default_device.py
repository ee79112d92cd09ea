"""Defaults of new tensors that a user may set."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class LikeCuda(TorchFunctionMode):
    """`torch.set_default_device("cuda")` as in a CUDA build, without a GPU: a tensor made without a
    device is on another one, and generators of the CPU are refused."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if f in _device_constructors() and kwargs.get("device") is None:
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            kwargs = kwargs | {"device": "meta"}
        return f(*args, **kwargs)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "a GPU": LikeCuda,
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}
