"""Formulas of the operators' floating-point operations, for torch.utils.flop_counter.

A multiply-add counts as two operations, as in torch's own formulas. Only pairs of query and key
that `left` and `right` leave visible count, because the kernels skip the others; torch's formula
for scaled_dot_product_attention counts all pairs, causal or not. `start` and `end` are ignored, and
pairs at distances outside the table count like all others. Backward counts all gradients, even if
not all are computed.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

import txl_kernels.operators  # noqa: F401  # defines the operators that are counted
from txl_kernels.call import Call

_COUNTER = "torch.utils.flop_counter"


def visible_pairs(length: int, memory_len: int, left: int | None, right: int | None) -> int:
    """Return the number of pairs of a query and a key that it sees, for one head of one batch
    row."""
    hidden_after = 0 if right is None else max(length - 1 - right, 0)  # of the first query; each next has one fewer
    hidden_before = 0 if left is None else max(memory_len + length - 1 - left, 0)  # of the last query
    queries = min(hidden_before, length)  # number of queries that do not see all keys before them
    return (
        length * (memory_len + length)
        - hidden_after * (hidden_after + 1) // 2
        - queries * (2 * hidden_before - queries + 1) // 2
    )


def _forward(*shapes: Any, **_: Any) -> int:
    """Return the FLOPs of forward: a product with each key, each row of r and each value.

    shapes: the operator's arguments, with shapes in place of tensors.
    """
    call: Any = Call(*shapes[: len(Call._fields)])
    tables = 1 if call.r is not None else 0
    return _pairs(call) * 2 * int(call.q[3] + tables * _position_width(call) + call.v[3])


def _backward(dout: Sequence[int], dlse: Any, out: Any, lse: Any, *shapes: Any, **_: Any) -> int:
    """Return the FLOPs of backward: the scores are computed again, and each product of forward has
    two in backward."""
    call: Any = Call(*shapes[: len(Call._fields)])
    tables = 1 if call.r is not None else 0
    return _pairs(call) * 2 * int(3 * (call.q[3] + tables * _position_width(call)) + 2 * call.v[3])


def _position_width(call: Any) -> int:
    width: int = (call.q if call.q_pos is None else call.q_pos)[3]
    return width


def _pairs(call: Any) -> int:
    batch, heads, length, _ = call.q
    memory_len = 0 if call.k_mem is None else call.k_mem[2]
    pairs: int = batch * heads * visible_pairs(length, memory_len, call.left, call.right)
    return pairs


def _register(counter: ModuleType) -> None:
    for operator, formula in (
        (torch.ops.txl_kernels.rel_attention, _forward),
        (torch.ops.txl_kernels.rel_attention_backward, _backward),
    ):
        if operator not in counter.flop_registry:  # by an earlier import of the package in this process
            counter.register_flop_formula(operator)(formula)


class _WhenImported(MetaPathFinder, Loader):
    """An import hook that registers the formulas when torch.utils.flop_counter is first imported.
    It is not imported here, because it imports Triton and takes most of a second."""

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
