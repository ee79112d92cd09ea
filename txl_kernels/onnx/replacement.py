"""The nodes that replace an attention: `txl::RelAttention`, the views of the graph's tensors that
it reads, and for each mask the first and last key that a query sees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from txl_kernels.onnx.graph import Graph, attribute
from txl_kernels.onnx.library import INPUTS
from txl_kernels.onnx.scores import Attention, Mask, Product, Refused

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

    def slice(self, name: str, start: str, end: str, axis: int) -> str:
        return self.add("Slice", name, start, end, self.constant([axis]))


def transposed(writer: Writer, name: str) -> str:
    """Return [B, H, L, D] of a factor [B, H, D, L], without its Transpose if it has one."""
    graph = writer.graph
    node = graph.producer(name)
    perm = [0, 1, 2, 3]
    if node is not None and node.op_type == "Transpose":
        perm, name = list(attribute(node, "perm", [3, 2, 1, 0])), node.input[0]
    perm[2:] = perm[3], perm[2]
    return name if perm == [0, 1, 2, 3] else writer.add("Transpose", name, perm=perm)


def table(writer: Writer, name: str, is_one: bool) -> str:
    """Return [H, T, D] of a factor [B or 1, H, D, T], of its first batch row.

    is_one: whether there is only one, whatever the batch.
    """
    node = writer.graph.producer(name)
    perm = [0, 1, 2, 3]
    if node is not None and node.op_type == "Transpose" and attribute(node, "perm", [3])[0] == 0:
        perm, name = list(attribute(node, "perm")), node.input[0]
    if is_one:  # Squeeze copies nothing
        moved = writer.add("Transpose", name, perm=[0, perm[1], perm[3], perm[2]])
        return writer.add("Squeeze", moved, writer.constant([0]))
    first = writer.add("Gather", name, writer.constant(0), axis=0)
    return writer.add("Transpose", first, perm=[perm[1] - 1, perm[3] - 1, perm[2] - 1])


def bounds(writer: Writer, mask: Mask, rank: int) -> tuple[str, str]:
    """Return start and end [B or 1, L or 1] of the keys that a mask leaves to each query.

    end is -1, which the operator refuses, where these keys are not consecutive.

    rank: that of the mask's root.
    """
    axes: list[int | None] = list(range(rank))
    for added in mask.added:
        size = len(axes) + len(added)
        for place in sorted(x % size for x in added):
            axes.insert(place, None)
    if len(axes) > 4 or not axes or axes[-1] != rank - 1:
        raise Refused(f"its mask {mask.root} does not have the keys on its last axis")
    axes = [*[None] * (4 - len(axes)), *axes]
    visible = writer.add("Not", mask.root) if mask.hides else mask.root
    bits = writer.add("Cast", visible, to=onnx.TensorProto.UINT8)
    first = writer.add("ArgMax", bits, axis=-1, keepdims=1)
    last = writer.add("ArgMax", bits, axis=-1, keepdims=1, select_last_index=1)
    ones = writer.add("Expand", writer.constant([[1]], np.uint8), _column(writer, bits, rank))
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


def _column(writer: Writer, name: str, rank: int) -> str:
    """Return the shape [S, 1] for a tensor whose last axis is S."""
    return writer.add("Concat", writer.size(name, rank - 1), writer.constant([1]), axis=0)


def operator(writer: Writer, attention: Attention, content: Product, position: Product, keys: str,
             limits: Sequence[tuple[str, str]], has_memory: bool, is_longer: bool, is_one: bool) -> None:  # fmt: skip
    """Add the operator, whose output has the name of the attention's.

    keys: [B, H, S, D]. limits: start and end of each mask. has_memory: whether there are more keys
    than queries. is_longer: whether the table has rows of distances that no query sees.
    is_one: whether it has one batch row, whatever the batch.

    Queries that see no key get what the graph gives them: 0 of the operator, or the mean of all
    values. (A product with ones: how ReduceMean takes its axes depends on the opset.)
    """
    query, query_position = content.node.input[0], position.node.input[0]
    rows, values = table(writer, position.node.input[1], is_one), attention.values
    given = {"q": query, "k": keys, "v": values}
    if has_memory or is_longer:
        length = writer.size(query, 2)
    if is_longer:
        count = writer.add("Sub", writer.add("Add", length, writer.size(keys, 2)), writer.constant([1]))
        rows = writer.slice(rows, writer.constant([0]), count, 1)
    if has_memory:
        split, zero, last = writer.add("Neg", length), writer.constant([0]), writer.constant([INT64_MAX])
        given["k_mem"], given["v_mem"] = (writer.slice(x, zero, split, 2) for x in (keys, values))
        given["k"], given["v"] = (writer.slice(x, split, last, 2) for x in (keys, values))
    given["r"] = rows
    if limits:
        start, end = limits[0]
        for more_start, more_end in limits[1:]:
            start, end = writer.add("Max", start, more_start), writer.add("Min", end, more_end)
        given |= {"start": start, "end": end}
    if query_position != query:
        given["q_pos"] = query_position
    inputs = [given.get(name, "") for name in INPUTS[: max(map(INPUTS.index, given)) + 1]]
    scales = {"scale": content.scale * content.factor, "position_scale": position.scale * position.factor}
    if not all(np.float32(x) for x in scales.values()):
        raise Refused(f"the operator has no factor of 0, got {scales}")
    settings: dict[str, Any] = {"causal": 0, "r_descending": 1} | scales
    output = attention.node.output[0]
    if not attention.averages:
        writer.add("RelAttention", *inputs, output=output, domain="txl", **settings)
        return
    mixed = writer.add("RelAttention", *inputs, domain="txl", **settings)
    none = writer.add("Unsqueeze", writer.add("GreaterOrEqual", start, end), writer.constant([1, 3]))
    ones = writer.add("Expand", writer.constant(1, np.float32), writer.size(values, 2))
    count = writer.add("Cast", writer.size(values, 2), to=onnx.TensorProto.FLOAT)
    mean = writer.add("Div", writer.add("MatMul", ones, values), count)
    writer.add("Where", none, writer.add("Unsqueeze", mean, writer.constant([2])), mixed, output=output)
