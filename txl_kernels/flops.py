"""Floating-point operations of the operators, for torch.utils.flop_counter.

Two for a multiply-add, as torch counts its own. Pairs of query and key are those that `left` and
`right` (causal or not, say) leave visible, for the kernels skip the others; torch's formula of
scaled_dot_product_attention counts all, causal or not. `start` and `end` are not read. Backward
counts all gradients, whichever are wanted.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

import txl_kernels.operators  # noqa: F401  # defines what is counted
from txl_kernels.call import Call

_COUNTER = "torch.utils.flop_counter"


def visible_pairs(length: int, memory_len: int, left: int | None, right: int | None) -> int:
    """Pairs of a query and a key that it sees, of one head of one batch row."""
    hidden_after = 0 if right is None else max(length - 1 - right, 0)  # of the first query; one less of each next
    hidden_before = 0 if left is None else max(memory_len + length - 1 - left, 0)  # of the last query
    queries = min(hidden_before, length)  # to which keys behind are hidden
    return (
        length * (memory_len + length)
        - hidden_after * (hidden_after + 1) // 2
        - queries * (2 * hidden_before - queries + 1) // 2
    )


def _forward(*shapes: Any, **_: Any) -> int:
    """FLOPs of forward, from the operator's arguments with shapes in place of tensors: a product
    with each key, with each row of r, and with each value."""
    call: Any = Call(*shapes[: len(Call._fields)])
    tables = 1 if call.r is not None else 0
    return _pairs(call) * 2 * int((1 + tables) * call.q[3] + call.v[3])


def _backward(dout: Sequence[int], dlse: Any, out: Any, lse: Any, *shapes: Any, **_: Any) -> int:
    """The scores again, and two products for each of forward's."""
    call: Any = Call(*shapes[: len(Call._fields)])
    tables = 1 if call.r is not None else 0
    return _pairs(call) * 2 * int(3 * (1 + tables) * call.q[3] + 2 * call.v[3])


def _pairs(call: Any) -> int:
    batch, heads, length, _ = call.q
    memory_len = 0 if call.k_mem is None else call.k_mem[2]
    pairs: int = batch * heads * visible_pairs(length, memory_len, call.left, call.right)
    return pairs


def _register(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.txl_kernels.rel_attention)(_forward)
    counter.register_flop_formula(torch.ops.txl_kernels.rel_attention_backward)(_backward)


class _WhenImported(MetaPathFinder, Loader):
    """Registers the formulas when somebody imports the counter, which itself imports Triton and so
    takes most of a second."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _COUNTER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _WhenImported())
