"""Translations of this package's torch operators to ONNX, for `torch.onnx.export(..,
dynamo=True)`."""

import ctypes
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from txl_kernels.call import Call, first_refused, refused_by
from txl_kernels.onnx.library import INPUTS

Value = Any  # an onnx_ir.Value: a tensor, or a size as int64 [], of the graph that is being written
_operators = torch.ops.txl_kernels
# The attributes of txl::RelAttention that are written.
_ATTRIBUTES = {
    "causal": "INT", "left": "INT", "right": "INT", "zero_row": "INT", "outside": "STRING", "scale": "FLOAT",
    "position_scale": "FLOAT", "softcap": "FLOAT",
}  # fmt: skip
_REFUSED = refused_by("onnx")
_TABLES = ("r", "r_bias")
_ALL_ROWS = 2**63 - 1  # the end of a slice


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the `custom_translation_table` with which `torch.onnx.export(.., dynamo=True)` writes
    the attention of this package as `txl::RelAttention`.

    An export raises torch.onnx's error, whose cause names the argument, where that operator cannot
    express a call.

    Raises:
        ImportError: onnxscript, which that exporter needs, is not installed.
    """
    import onnxscript  # noqa: F401

    return {_operators.rel_attention.default: _rel_attention, _operators.intervals.default: _intervals}


def _rel_attention(*arguments: Any) -> tuple[Value, Value]:
    """Write a call of `txl_kernels::rel_attention`; return its out, and a value that no node
    computes in place of lse."""
    from onnxscript import ir

    *fields, _ = arguments
    call = Call(*fields)
    _check(call)
    tables, zero_row = _tables(call)
    inputs = call._asdict() | tables
    attributes = _settings(call) | ({} if zero_row is None else {"zero_row": zero_row})
    return _operator()(*(inputs[name] for name in INPUTS), **attributes), ir.Value()


# torch.onnx before 2.9 matches arguments with the parameters of a translation.
_rel_attention.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*Call._fields, "backend")]
)


@functools.cache
def _operator() -> Any:
    """Return `txl::RelAttention` as onnxscript's functions call it."""
    from onnx.defs import OpSchema
    from onnxscript.values import Op, Opset

    optional = OpSchema.FormalParameterOption.Optional
    bounds = {"start": "I", "end": "I"}
    inputs = [
        OpSchema.FormalParameter(name, bounds.get(name, "F"), **({"param_option": optional} if n > 2 else {}))
        for n, name in enumerate(INPUTS)
    ]
    attributes = [
        OpSchema.Attribute(name, getattr(OpSchema.AttrType, kind), required=False) for name, kind in _ATTRIBUTES.items()
    ]
    schema = OpSchema(
        "RelAttention", "txl", 1, "", inputs=inputs, outputs=[OpSchema.FormalParameter("out", "F")],
        type_constraints=[("F", ["tensor(float)"], ""), ("I", ["tensor(int32)", "tensor(int64)"], "")],
        attributes=attributes,
    )  # fmt: skip
    return Op(Opset("txl", 1), "RelAttention", schema)


def _check(call: Call) -> None:
    """Check that the operator of ONNX Runtime can express a call.

    Raises:
        TypeError, ValueError: it cannot; the message names the argument.
    """
    from onnxscript import ir

    if call.q.dtype != ir.DataType.FLOAT:
        raise TypeError(f"q must be float32 for txl::RelAttention, as all tensors but bounds, got {call.q.dtype}")
    if call.dropout_p:
        raise ValueError(
            f"dropout_p must be 0 for txl::RelAttention, got {call.dropout_p}: call model.eval() before the export"
        )
    field = first_refused(call, _REFUSED)
    if field is not None:
        raise ValueError(f"txl::RelAttention does not take {field}")
    for name in ("left", "right", "scale", "position_scale", "softcap"):
        value = getattr(call, name)
        if not isinstance(value, int | float | None):
            raise TypeError(
                f"{name} must be a constant for txl::RelAttention, got a value that depends on an input's size"
            )
    for name in ("scale", "position_scale"):
        if ctypes.c_float(getattr(call, name)).value == 0:
            raise ValueError(
                f"{name} must not be 0 in float32 for txl::RelAttention, where it means the default, got "
                f"{getattr(call, name)}"
            )
    node = _fx_node(call.q)
    if node is not None and any(_returns_lse(other) for other in node.graph.nodes):
        raise ValueError(
            "return_lse must be False for txl::RelAttention, which has no such output, got True (a prefix, or several "
            "intervals for each query, need it, too)"
        )


def _returns_lse(node: torch.fx.Node) -> bool:
    return node.target is _operators.rel_attention.default and any(
        user.args[1] == 1 and user.users for user in node.users
    )


def _settings(call: Call) -> dict[str, Any]:
    """Return the attributes but for zero_row, without those whose default says the same."""
    found: dict[str, Any] = {"causal": int(call.right == 0)}
    found |= {} if call.left is None else {"left": call.left}
    found |= {} if call.right in (None, 0) else {"right": call.right}
    found |= {"outside": "zero"} if call.zero_outside else {}
    width = call.q.shape[3]
    if not isinstance(width, int) or call.scale != 1 / math.sqrt(max(width, 1)):
        found["scale"] = float(call.scale)
    found |= {} if call.position_scale == call.scale else {"position_scale": float(call.position_scale)}
    return found | ({"softcap": float(call.softcap)} if call.softcap else {})


def _tables(call: Call) -> tuple[dict[str, Value], int | None]:
    """Return r and r_bias as inputs of the operator, and its attribute zero_row; None for its
    default.

    The default is row 0 of a causal call, and row L - 1 of M + 2 L - 1 rows of one for both
    directions. Where a zero_row that depends on a size is not known to be that row, the graph cuts
    the tables such that it is, or, with a finite `right`, row `right`.
    """
    tables = {name: getattr(call, name) for name in _TABLES if getattr(call, name) is not None}
    if isinstance(call.zero_row, int):
        return tables, call.zero_row
    if _is_default(call, next(iter(tables.values()))):
        return tables, None
    return {name: _cut(call, x) for name, x in tables.items()}, call.right or None


def _is_default(call: Call, table: Value) -> bool:
    """Whether the zero_row of a call is known to be the operator's default, for all sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a second

    zero_row, q, of_table = (_traced(x) for x in (call.zero_row, call.q, table))
    k_mem = None if call.k_mem is None else _traced(call.k_mem)
    if zero_row is None or q is None or of_table is None or (call.k_mem is not None and k_mem is None):
        return False
    if call.right == 0:
        return bool(statically_known_true(zero_row == 0))
    length, rows = q.shape[2], (0 if k_mem is None else k_mem.shape[2]) + 2 * q.shape[2] - 1
    return bool(statically_known_true(zero_row == length - 1) and statically_known_true(of_table.shape[1] == rows))


def _cut(call: Call, table: Value) -> Value:
    """Write the rows of a table, [H, T, Dp] or [H, T], with which a constant zero_row is right.

    If `outside` is "refuse" and there is no row for a distance that `left` and `right` leave
    visible, it writes fewer rows, which the operator refuses when it runs.
    """
    from onnxscript import ir
    from onnxscript import opset18 as op

    zero_row = op.Reshape(call.zero_row, [-1])
    if call.right == 0:
        return op.Slice(table, zero_row, [_ALL_ROWS], [1])
    rows, length = op.Shape(table, start=1, end=2), op.Shape(call.q, start=2, end=3)
    keys = length if call.k_mem is None else op.Add(op.Shape(call.k_mem, start=2, end=3), length)
    future = op.Sub(length, [1])
    if call.right is None:
        first, last = op.Sub(zero_row, future), op.Add(zero_row, keys)
    else:
        first, last = op.Sub(zero_row, [call.right]), rows
        future = op.Min(future, op.Constant(value_ints=[call.right]))
    before = op.Max(op.Neg(first), op.Constant(value_ints=[0]))  # rows that are missing in front
    after = op.Max(op.Sub(last, op.Max(rows, first)), op.Constant(value_ints=[0]))
    start = op.Max(first, op.Constant(value_ints=[0]))
    if not call.zero_outside:
        past = op.Sub(keys, [1])
        past = past if call.left is None else op.Min(past, op.Constant(value_ints=[call.left]))
        complete = op.And(op.GreaterOrEqual(zero_row, future), op.Greater(op.Sub(rows, zero_row), past))
        last = last if call.right is None else op.Where(complete, last, op.Add(start, [1]))
        before, after = (op.Mul(x, op.Cast(complete, to=ir.DataType.INT64.value)) for x in (before, after))
    cut = op.Slice(table, start, last, [1])
    return op.Pad(cut, op.Concat(before, after, axis=0), None, [1])


def _intervals(mask: Value, visible: bool) -> tuple[Value, Value, Value]:
    """Write `txl_kernels::intervals`: return start, end and hole."""
    from onnxscript import ir
    from onnxscript import opset18 as op

    def where(x: Value, axis: int, last: int = 0) -> Value:
        """Write the index of the first or last 1 of x along an axis, or 0 if there is none."""
        return op.ArgMax(x, axis=axis, keepdims=0, select_last_index=last)

    def cast(x: Value, dtype: ir.DataType) -> Value:
        return op.Cast(x, to=dtype.value)

    seen = cast(mask if visible else op.Not(mask), ir.DataType.INT32)
    count = cast(op.ReduceSum(seen, [-1], keepdims=0), ir.DataType.INT64)
    start = where(seen, -1)
    end = op.Where(op.Equal(count, 0), 0, op.Add(where(seen, -1, 1), 1))
    holes = op.Reshape(cast(op.Not(op.Equal(op.Sub(end, start), count)), ir.DataType.INT32), [-1])
    hole = op.Where(cast(op.ReduceMax(holes, keepdims=0), ir.DataType.BOOL), where(holes, 0), -1)
    return cast(start, ir.DataType.INT32), cast(end, ir.DataType.INT32), hole


def _fx_node(value: Value) -> torch.fx.Node | None:
    """Return the node of the exported program that a value of the graph comes from; None if
    torch.onnx does not tell."""
    producer = value.producer()
    node: torch.fx.Node | None = (value if producer is None else producer).meta.get("node")
    if node is None or node.name == value.name:
        return node
    # A translation may return one of its arguments, or a constant of another node.
    return next((other for other in node.graph.nodes if other.name == value.name), None)


def _traced(value: Value) -> Any:
    """Return the fake tensor or SymInt of a value; None if torch.onnx does not tell."""
    node = _fx_node(value)
    return None if node is None else node.meta.get("val")
