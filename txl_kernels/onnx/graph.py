"""A model's graph as `rewrite` reads it: who makes and uses a tensor, small constants, and what is
left when nodes are replaced."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

MAX_CONSTANT = 64  # elements of a constant that is read
MIN_WEIGHTS = 4096  # elements of a constant that a run is given as an input
SIZES = ("Shape", "Size", "EyeLike")  # operators that do not read a tensor's values
# Operators whose output has another size for other values.
SIZED_BY_VALUES = ("NonZero", "Compress", "Unique", "If", "Loop", "Scan")
# Operators that make a tensor of a given size, or cut it out of one, and the first such input.
PLACED = dict.fromkeys(("Reshape", "Slice", "Pad", "Expand", "Split", "Tile", "Resize"), 1) | dict.fromkeys(
    ("Range", "ConstantOfShape"), 0
)


class Graph:
    """The outermost graph of a model.

    folder: that of the files of initializers that are not loaded.

    Raises:
        ValueError: such a file is not there.
    """

    def __init__(self, model: onnx.ModelProto, folder: str) -> None:
        self.model = model
        self.folder = folder
        self.nodes = in_order(model.graph.node)
        self.initializers = {x.name: x for x in model.graph.initializer}
        self.outputs = {x.name for x in model.graph.output}
        self.functions = {(x.domain, x.name): x for x in model.functions}
        self._names: dict[int, tuple[onnx.NodeProto, tuple[str, ...], tuple[str, ...]]] = {}
        self._index()
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location" and not (Path(folder) / entry.value).is_file():
                    raise ValueError(f"folder must have the model's file of initializers {entry.value}, got {folder!r}")

    def _index(self) -> None:
        self.producers = {name: node for node in self.nodes for name in self.names(node)[1] if name}
        self.consumers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in self.names(node)[0]:
                self.consumers.setdefault(name, []).append(node)

    def names(self, node: onnx.NodeProto) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors that a node reads, and those that it makes. They are kept, because a
        protocol buffer takes long to give them."""
        kept = self._names.get(id(node))
        if kept is None:
            kept = self._names[id(node)] = node, tuple(dict.fromkeys(inputs_of(node))), tuple(node.output)
        return kept[1:]

    def producer(self, name: str) -> onnx.NodeProto | None:
        return self.producers.get(name)

    def free_number(self) -> int:
        """Return the first number of "txl/<number>/", with which no name begins, nor with a higher
        one: an earlier `rewrite` may have written such names."""
        names = [*self.producers, *self.initializers, *(x.name for x in (*self.nodes, *self.model.graph.input))]
        taken = [int(found[1]) for name in names if (found := re.match(r"txl/(\d+)/", name))]
        return max(taken, default=-1) + 1

    def opset(self) -> int:
        """Return the version of ONNX's own operators."""
        return max((x.version for x in self.model.opset_import if x.domain in ("", "ai.onnx")), default=0)

    def constant(self, name: str, most: int = MAX_CONSTANT) -> np.ndarray[Any, Any] | None:
        """Return the value of a constant of at most so many elements, or None; a run may give other
        values for an initializer that is an input of the model, too."""
        if any(x.name == name for x in self.model.graph.input):
            return None
        node = self.producers.get(name)
        tensor = self.initializers.get(name)
        if node is not None and node.op_type == "Identity":
            return self.constant(node.input[0], most)
        if node is not None and node.op_type == "Constant":
            return constant_of(node, most)
        if tensor is None or math.prod(tensor.dims) > most:
            return None
        return np.asarray(numpy_helper.to_array(tensor, base_dir=self.folder))

    def constant_shape(self, name: str) -> list[int] | None:
        """Return the shape of a constant, or None."""
        tensor, node = self.initializers.get(name), self.producers.get(name)
        if node is not None and node.op_type == "Constant":
            tensor = attribute(node, "value")
        return None if tensor is None else list(tensor.dims)

    def weights(self) -> dict[str, onnx.TensorProto]:
        """Return the large constants of float32 that are in the model."""
        found = dict(self.initializers)
        for node in self.nodes:
            if node.op_type == "Constant" and (tensor := attribute(node, "value")) is not None:
                found[node.output[0]] = tensor
        inputs = {x.name for x in self.model.graph.input}
        return {
            name: x
            for name, x in found.items()
            if x.data_type == onnx.TensorProto.FLOAT
            and not x.external_data
            and np.prod(x.dims) > MIN_WEIGHTS
            and name not in inputs
        }

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of an initializer."""
        return np.asarray(numpy_helper.to_array(self.initializers[name], base_dir=self.folder))

    def scalar(self, name: str) -> float | None:
        """Return the value of a constant with one element, or None."""
        value = self.constant(name)
        if value is None or value.size != 1 or value.dtype.kind not in "biuf":
            return None
        return float(value.reshape(-1)[0])

    def origins(self, names: Iterable[str], sizes: Iterable[str] = (), placed: bool = False) -> dict[str, None]:
        """Return the tensors on whose values others depend, these others included.

        sizes: further others, of which only the size counts.
        placed: whether a size depends on the positions of a Slice and the like, too. Where these
            come from values of the inputs, as in a mask of padding that is as long as the longest
            batch row, the size is still that of the other tensors, or they do not fit.
        """
        values, only_sizes = dict.fromkeys(names), dict.fromkeys(sizes)
        waiting = [*((name, True) for name in values), *((name, False) for name in only_sizes)]
        while waiting:
            name, is_value = waiting.pop()
            node = self.producer(name)
            if node is None:
                continue
            inputs = self.names(node)[0]
            if (node.domain, node.op_type) in self.functions or (not is_value and node.op_type in SIZED_BY_VALUES):
                first = 0
            elif is_value:
                first = len(inputs) if node.op_type in SIZES else 0
            else:
                first = PLACED.get(node.op_type, len(inputs)) if placed else len(inputs)
            for n, x in enumerate(inputs):
                seen = values if n >= first else only_sizes
                if x not in seen:
                    seen[x] = None
                    waiting.append((x, n >= first))
        return values

    def has_values(self, *names: str) -> bool:
        """Whether tensors depend on values of the model's inputs, not on their sizes alone."""
        return not self.origins(names).keys().isdisjoint(x.name for x in self.model.graph.input)

    def inside(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield a node, and those of the model's function that it calls."""
        yield node
        if (node.domain, node.op_type) in self.functions:
            for inner in self.functions[node.domain, node.op_type].node:
                yield from self.inside(inner)

    def nodes_between(
        self, starts: Iterable[str], ends: Sequence[str], masks: Sequence[str] = ()
    ) -> tuple[list[onnx.NodeProto], list[str]]:
        """Return the nodes by which tensors depend on others, in their order, with the constants
        that they read; and the further tensors that they read.

        masks: further starts, on whose values tensors may depend, but not on their sizes.
        """
        given = {*starts, *masks}
        dependent, of_masks, found = set(starts), set(masks), []
        for node in self.needed_for(self.nodes, ends):
            inputs, outputs = self.names(node)
            if not dependent.isdisjoint(outputs) or not of_masks.isdisjoint(outputs):
                continue
            if not dependent.isdisjoint(inputs):
                dependent.update(outputs)
            elif not of_masks.isdisjoint(inputs) and node.op_type not in SIZES:
                of_masks.update(outputs)
            else:
                continue
            found.append(node)
        found = self.needed_for(found, ends)
        names = dict.fromkeys(name for node in found for name in self.names(node)[0])
        made = {name for node in found for name in node.output} | given | self.initializers.keys()
        read = (self.producer(name) for name in names if name not in given)
        constants = [x for x in read if x is not None and x.op_type == "Constant"]
        made.update(x.output[0] for x in constants)
        return [*constants, *found], [name for name in names if name not in made]

    def replace(self, new: Mapping[str, Sequence[onnx.NodeProto]]) -> list[onnx.NodeProto]:
        """Return the nodes that are left if others make some nodes' first outputs."""
        nodes = [x for old in self.nodes for x in new.get(self.names(old)[1][0], (old,))]
        return self.needed_for(nodes, self.outputs)

    def needed_for(self, nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
        """Return the nodes on which the outputs depend, in their order, which is topological."""
        needed, kept = set(outputs), []
        for node in reversed(nodes):
            inputs, made = self.names(node)
            if not needed.isdisjoint(made):
                needed.update(inputs)
                kept.append(node)
        return kept[::-1]

    def set_nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self.nodes = list(nodes)
        self._index()

    def store(self) -> None:
        """Write the nodes to the model, without initializers and types of tensors that are gone."""
        graph = self.model.graph
        del graph.node[:]
        graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in self.names(node)[0]} | self.outputs
        made = {name for node in self.nodes for name in self.names(node)[1]}
        given = {x.name for x in graph.input}
        for field, names in ((graph.initializer, used | given), (graph.value_info, made)):
            for n in reversed(range(len(field))):  # a list of what is left would be a copy
                if field[n].name not in names:
                    del field[n]
        # Tools that infer types, such as quantize_dynamic, do not know the operator.
        typed = {x.name for x in (*graph.value_info, *graph.output)}
        outputs = [x.output[0] for x in self.nodes if x.domain == "txl" and x.output[0] not in typed]
        tensor = onnx.helper.make_tensor_value_info
        graph.value_info.extend(tensor(name, onnx.TensorProto.FLOAT, [None] * 4) for name in outputs)
        if all(x.domain != "txl" for x in self.model.opset_import):
            self.model.opset_import.append(onnx.helper.make_opsetid("txl", 1))


def attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    for x in node.attribute:
        if x.name == name:
            return onnx.helper.get_attribute_value(x)
    return default


def constant_of(node: onnx.NodeProto, most: int = MAX_CONSTANT) -> np.ndarray[Any, Any] | None:
    """Return the value of a Constant of at most so many elements, or None."""
    [given] = [onnx.helper.get_attribute_value(x) for x in node.attribute]
    if isinstance(given, onnx.TensorProto) and math.prod(given.dims) <= most:
        return np.asarray(numpy_helper.to_array(given))
    return np.asarray(given) if isinstance(given, (int, float, list)) else None


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, those of the outer graph that its inner graphs read
    included."""
    yield from (name for name in node.input if name)
    for graph in inner_graphs(node):
        own = {x.name for x in (*graph.input, *graph.initializer)}
        own.update(name for inner in graph.node for name in inner.output)
        read = [name for inner in graph.node for name in inputs_of(inner)]
        yield from (name for name in [*read, *(x.name for x in graph.output)] if name not in own)


def inner_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs of If, Loop or Scan."""
    return [graph for x in node.attribute if x.HasField("g") or x.graphs for graph in (*x.graphs, x.g)]


def in_order(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return nodes in topological order, and as they are given where that is one. ONNX Runtime also
    takes others."""
    nodes = list(nodes)
    producers = {name: n for n, node in enumerate(nodes) for name in node.output if name}
    placed: dict[int, None] = {}
    for first in range(len(nodes)):
        waiting, begun = [first], set()
        while waiting:
            n = waiting[-1]
            before = [] if n in begun else [producers[x] for x in inputs_of(nodes[n]) if x in producers]
            begun.add(n)
            before = [x for x in before if x not in placed and x not in begun]
            waiting += before
            if not before:
                placed.setdefault(waiting.pop())
    return [nodes[n] for n in placed]
