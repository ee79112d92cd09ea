"""The nodes that replace an attention: `txl::RelAttention`, the tensors of the graph that it reads,
and for each mask the first and last key that a query sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from txl_kernels.onnx.graph import Graph, attribute
from txl_kernels.onnx.library import INPUTS
from txl_kernels.onnx.scores import Attention, Mask, Refused

INT64_MAX = np.iinfo(np.int64).max


class Writer:
    """Nodes in the making, with names that the graph does not have.

    prefix: of the names.
    """

    def __init__(self, graph: Graph, prefix: str) -> None:
        self.graph = graph
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []

    def add(self, kind: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        """Add a node, and return its output."""
        output = output or f"{self.prefix}/{len(self.nodes)}_{kind}"
        name = f"{self.prefix}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=name, domain=domain, **attributes))
        return output

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        return self.add("Constant", value=numpy_helper.from_array(np.array(values, dtype)))

    def size(self, name: str, axis: int) -> str:
        """Return the size of a tensor's axis, int64 [1]."""
        return self.add("Gather", self.add("Shape", name), self.constant([axis]))

    def mean(self, name: str, axis: int) -> str:
        """Return the mean along an axis, whose size becomes 1."""
        if self.graph.opset() < 18:
            return self.add("ReduceMean", name, axes=[axis])
        return self.add("ReduceMean", name, self.constant([axis]))

    def slice(self, name: str, start: str, end: str, axis: int) -> str:
        return self.add("Slice", name, start, end, self.constant([axis]))


@dataclass(frozen=True)
class View:
    """A factor of a product as what Transposes, a bias of each head and a number make of another
    tensor: number * (root + bias), with other axes.

    Attributes:
        root: that tensor.
        axes: for each axis of the factor that of the root.
        number: by which it is multiplied.
        bias: the constant that is added before, or None; it has one element along all axes but two.
        sizes: of the bias, for each of its axes, by the root's axis to which it is added.
        between: the tensors from the root to the factor, and for each of their axes the root's.
    """

    root: str
    axes: tuple[int, ...] = (0, 1, 2, 3)
    number: float = 1.0
    bias: str | None = None
    sizes: dict[int, int] = field(default_factory=dict)
    between: dict[str, tuple[int, ...]] = field(default_factory=dict)


def view(graph: Graph, name: str, number: bool = True, bias: bool = False) -> View:
    """Return a factor as a view of the tensor before its Transposes.

    number: whether it may be multiplied by a number. bias: whether it may be the sum with a bias of
    a query [B, H, L, D].
    """
    found = _view(graph, name, number, bias)
    is_bias = [n for n, size in found.sizes.items() if size > 1] == [found.axes[1], found.axes[3]]
    return found if is_bias or not found.bias else _view(graph, name, number, False)


def _view(graph: Graph, name: str, number: bool, bias: bool) -> View:
    node = graph.producer(name)
    if node is None:
        return View(name)
    if node.op_type == "Transpose":
        perm = attribute(node, "perm", [3, 2, 1, 0])
        if len(perm) == 4 and perm[0] == 0:
            of = _view(graph, node.input[0], number, bias)
            axes = tuple(of.axes[x] for x in perm)
            return replace(of, axes=axes, between=of.between | {name: axes})
    if node.op_type not in ("Add", "Mul", "Div"):
        return View(name)
    first, second = node.input
    for x, other in ((first, second), (second, first))[: 1 if node.op_type == "Div" else 2]:
        if number and node.op_type != "Add" and (value := graph.scalar(other)):
            of = _view(graph, x, number, bias)
            value = of.number * (value if node.op_type == "Mul" else 1 / value)
            return replace(of, number=value, between=of.between | {name: of.axes})
        shape = graph.constant_shape(other) if bias and node.op_type == "Add" else None
        if shape is not None and len(shape) <= 4:
            of = _view(graph, x, False, False)
            sizes = dict(zip(of.axes, (*[1] * (4 - len(shape)), *shape), strict=True))
            return replace(of, bias=other, sizes=sizes, between=of.between | {name: of.axes})
    return View(name)


@dataclass(frozen=True)
class Operands:
    """The factors of an attention's products, as views of the tensors that the operator reads.

    Attributes:
        query, query_position: [B, H, L, D].
        keys: [B, H, D, S].
        values: [B, H, S, D].
        rows: [B or 1, H, D, T], the table.
        transposed: the only reader of the attention's output [B, H, L, D] if that makes [B, L, H,
            D] of it, or None.
    """

    query: View
    query_position: View
    keys: View
    values: View
    rows: View
    transposed: onnx.NodeProto | None

    @property
    def views(self) -> tuple[View, ...]:
        return self.query, self.query_position, self.keys, self.values, self.rows

    def names(self) -> dict[str, bool]:
        """Return the tensors that the operator reads, and for each whether it is the table."""
        biases = [x.bias for x in self.views if x.bias]
        return dict.fromkeys([*(x.root for x in self.views), *biases], False) | {self.rows.root: True}

    def layout(self) -> str:
        """Return the layout that takes fewer Transposes."""
        counts = {"BHLD": int(self.transposed is not None), "BLHD": int(self.transposed is None)}
        for layout, orders in ORDERS.items():
            views = (self.query, self.query_position, self.keys, self.values)
            needed = {(x.root, perm_of(x, order)) for x, order in zip(views, orders, strict=True)}
            counts[layout] += sum(list(perm) != sorted(perm) for _, perm in needed)
        return min(counts, key=lambda layout: counts[layout])


# The axes of query, query_position, keys and values as the operator reads them in each layout.
ORDERS = {
    "BHLD": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3, 2), (0, 1, 2, 3)),
    "BLHD": ((0, 2, 1, 3), (0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 1, 3)),
}


def operands(graph: Graph, attention: Attention) -> Operands:
    """Return the operands of an attention."""
    (query, keys), (query_position, rows) = attention.content.node.input, attention.position.node.input
    output = attention.node.output[0]
    readers = [] if output in graph.outputs else graph.consumers.get(output, [])
    is_transposed = [x.op_type == "Transpose" and attribute(x, "perm") == [0, 2, 1, 3] for x in readers] == [True]
    return Operands(
        view(graph, query, bias=True), view(graph, query_position, bias=True), view(graph, keys),
        view(graph, attention.values, number=False), view(graph, rows), readers[0] if is_transposed else None,
    )  # fmt: skip


def perm_of(of: View, order: Sequence[int]) -> tuple[int, ...]:
    """Return the Transpose of a view's root with which its axes come in an order."""
    return tuple(of.axes[x] for x in order)


def transposed(writer: Writer, name: str, perm: Sequence[int]) -> str:
    return name if list(perm) == sorted(perm) else writer.add("Transpose", name, perm=list(perm))


def table(writer: Writer, rows: View, layout: str, is_one: bool) -> str:
    """Return [H, T, D], or in layout BLHD [T, H, D], of a factor [B or 1, H, D, T], of its first
    batch row.

    is_one: whether there is only one, whatever the batch.
    """
    perm = perm_of(rows, (0, 3, 1, 2) if layout == "BLHD" else (0, 1, 3, 2))
    if is_one:  # Squeeze copies nothing
        return writer.add("Squeeze", transposed(writer, rows.root, perm), writer.constant([0]))
    first = writer.add("Gather", rows.root, writer.constant(0), axis=0)
    return transposed(writer, first, [x - 1 for x in perm[1:]])


def bias(writer: Writer, query: View) -> str:
    """Return the bias [H, D] of a query; "" if it has none."""
    if not query.bias:
        return ""
    sizes = [query.sizes[query.axes[1]], query.sizes[query.axes[3]]]
    is_plain = writer.graph.constant_shape(query.bias) == sizes
    return query.bias if is_plain else writer.add("Reshape", query.bias, writer.constant(sizes))


def shapes(graph: Graph, writer: Writer, of: View) -> dict[str, list[onnx.NodeProto]]:
    """Return for each Shape of a tensor between a root and its view, by its output, nodes that read
    the root instead: the Transpose would stay for the Shape alone."""
    new: dict[str, list[onnx.NodeProto]] = {}
    for name, axes in of.between.items():
        for node in graph.consumers.get(name, []):
            if node.op_type == "Shape" and not node.attribute:
                begin = len(writer.nodes)
                perm = writer.constant(list(axes))
                writer.add("Gather", writer.add("Shape", of.root), perm, output=node.output[0])
                new[node.output[0]] = writer.nodes[begin:]
    return new


def bounds(writer: Writer, mask: Mask, rank: int) -> tuple[str, str]:
    """Return start and end [B or 1, L or 1] of the keys that a mask leaves to each query.

    end is -1, which the operator refuses, where these keys are not consecutive.

    rank: that of the mask's root.
    """
    axes: list[int | None] = list(range(rank))
    for new in mask.new_axes:
        size = len(axes) + len(new)
        for place in sorted(x % size for x in new):
            axes.insert(place, None)
    if len(axes) > 4 or not axes or axes[-1] != rank - 1:
        raise Refused(f"its mask {mask.root} does not have the keys on its last axis")
    axes = [*[None] * (4 - len(axes)), *axes]
    visible = writer.add("Not", mask.root) if mask.hides else mask.root
    bits = writer.add("Cast", visible, to=onnx.TensorProto.UINT8)
    first = writer.add("ArgMax", bits, axis=-1, keepdims=1)
    last = writer.add("ArgMax", bits, axis=-1, keepdims=1, select_last_index=1)
    column = writer.add("Concat", writer.size(bits, rank - 1), writer.constant([1]), axis=0)
    ones = writer.add("Expand", writer.constant([[1]], np.uint8), column)  # [S, 1]
    number = writer.add("Cast", writer.add("MatMulInteger", bits, ones), to=onnx.TensorProto.INT64)
    none = writer.add("Equal", number, writer.constant(0))
    end = writer.add("Add", first, number)
    after = writer.add("Add", last, writer.constant(1))
    consecutive = writer.add("Or", none, writer.add("Equal", end, after))
    end = writer.add("Where", consecutive, end, writer.constant(-1))
    # [B or 1, L or 1] of [..., 1]: batch and query where the root has them.
    shape = [0 if axes[0] is not None else 1, -1]
    if axes[0] is None and axes[2] is None:
        shape = [1, 1]
    elif axes[2] is None:
        shape = [-1, 1]
    target = writer.constant(shape)
    return writer.add("Reshape", first, target), writer.add("Reshape", end, target)


def operator(writer: Writer, attention: Attention, given: Operands, limits: Sequence[tuple[str, str]],
             has_memory: bool, is_longer: bool, is_one: bool) -> onnx.NodeProto:  # fmt: skip
    """Add the operator, and return the node that it replaces: the product with the values, or the
    Transpose after it.

    limits: start and end of each mask. has_memory: whether there are more keys than queries.
    is_longer: whether the table has rows of distances that no query sees. is_one: whether it has
    one batch row, whatever the batch.

    Queries that see no key get what the graph gives them: 0 of the operator, or the mean of all
    values.
    """
    content, position, layout = attention.content, attention.position, given.layout()
    length_axis = layout.index("L")
    views = (given.query, given.query_position, given.keys, given.values)
    made: dict[tuple[str, tuple[int, ...]], str] = {}
    for x, order in zip(views, ORDERS[layout], strict=True):
        key = x.root, perm_of(x, order)
        made[key] = made.get(key) or transposed(writer, *key)
    query, query_position, keys, values = (
        made[x.root, perm_of(x, order)] for x, order in zip(views, ORDERS[layout], strict=True)
    )
    rows = table(writer, given.rows, layout, is_one)
    inputs = {"q": query, "k": keys, "v": values}
    if has_memory or is_longer:
        length = writer.size(query, length_axis)
    if is_longer:
        count = writer.add("Sub", writer.add("Add", length, writer.size(keys, length_axis)), writer.constant([1]))
        rows = writer.slice(rows, writer.constant([0]), count, layout == "BHLD")
    if has_memory:
        split, zero, last = writer.add("Neg", length), writer.constant([0]), writer.constant([INT64_MAX])
        inputs["k_mem"], inputs["v_mem"] = (writer.slice(x, zero, split, length_axis) for x in (keys, values))
        inputs["k"], inputs["v"] = (writer.slice(x, split, last, length_axis) for x in (keys, values))
    inputs |= {"r": rows, "content_bias": bias(writer, given.query)}
    inputs["position_bias"] = bias(writer, given.query_position)
    if limits:
        start, end = limits[0]
        for more_start, more_end in limits[1:]:
            start, end = writer.add("Max", start, more_start), writer.add("Min", end, more_end)
        inputs |= {"start": start, "end": end}
    if query_position != query:
        inputs["q_pos"] = query_position
    names = [inputs.get(name, "") for name in INPUTS]
    while not names[-1]:
        names.pop()
    scales = {
        "scale": content.scale * content.factor * given.query.number * given.keys.number,
        "position_scale": position.scale * position.factor * given.query_position.number * given.rows.number,
    }
    if not all(np.float32(x) for x in scales.values()):
        raise Refused(f"the operator has no factor of 0, got {scales}")
    settings: dict[str, Any] = {"causal": 0, "r_descending": 1} | scales
    if layout == "BLHD":
        settings["layout"] = layout
    node = given.transposed if layout == "BLHD" and given.transposed is not None else attention.node
    is_moved = layout == "BLHD" and node is attention.node
    output = "" if is_moved else node.output[0]
    if attention.means_without_keys:
        mixed = writer.add("RelAttention", *names, domain="txl", **settings)
        axes = [1, 3] if layout == "BHLD" else [2, 3]
        none = writer.add("Unsqueeze", writer.add("GreaterOrEqual", start, end), writer.constant(axes))
        output = writer.add("Where", none, writer.mean(values, length_axis), mixed, output=output)
    else:
        output = writer.add("RelAttention", *names, output=output, domain="txl", **settings)
    if is_moved:
        writer.add("Transpose", output, perm=[0, 2, 1, 3], output=node.output[0])
    return node
