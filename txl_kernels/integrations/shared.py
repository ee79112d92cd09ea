"""What values decide: asked of tensors, once for all layers of a forward that share them."""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_last = threading.local()


def holds(condition: Tensor, message: str) -> bool:
    """Whether a condition, bool [], is met; while compiling, True, and asserted when the graph
    runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
        return True
    return bool(condition)


def once(kind: str, x: Tensor, key: Any, compute: Callable[[], T]) -> T:
    """compute(), or what it gave when this thread asked for the same tensor and key last.

    A tensor changed in place is another, but for changes that its version does not tell: through
    `.data` or memory that it shares. Inference tensors tell none, and are worked out each time.
    """
    if torch.compiler.is_compiling() or x.is_inference():
        return compute()
    last = _last.__dict__.get(kind)
    if last is not None and last[0]() is x and last[1] == x._version and last[2] == key:
        result: T = last[3]
        return result
    with torch.inference_mode(False):  # what comes of it may be used in training
        result = compute()
    _last.__dict__[kind] = (weakref.ref(x), x._version, key, result)
    return result
