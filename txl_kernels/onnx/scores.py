"""The reading of an attention in a graph: from the product with the values back to the softmax, and
through its scores to two products, masks and factors. What it finds is checked by a run
(`trial.py`)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx

from txl_kernels.onnx.graph import Graph, attribute

# Operators that move the elements of their first input.
MOVES = (
    "Reshape", "Slice", "Pad", "Concat", "Transpose", "Unsqueeze", "Squeeze", "Gather", "Split", "Identity", "Expand",
)  # fmt: skip
HIDDEN = -1e4  # a score that is set to it or to less is hidden: real ones are not so low
NO_POSITIONS = "its scores have no relative positions"


class Refused(Exception):
    """The reason why an attention is not replaced.

    concerns: False if it has no relative positions.
    """

    def __init__(self, reason: str, concerns: bool = True) -> None:
        super().__init__(reason)
        self.concerns = concerns


@dataclass(frozen=True)
class Product:
    """A product that is a term of the scores.

    Attributes:
        node: the MatMul.
        shifted: its elements where they are added; the MatMul's output, or what Pad, Reshape and
            Slice make of it.
        factor: what they are multiplied by between the product and `shifted`.
        scale: the same, between `shifted` and the softmax.
    """

    node: onnx.NodeProto
    shifted: str
    factor: float
    scale: float

    @property
    def output(self) -> str:
        return str(self.node.output[0])


@dataclass(frozen=True)
class Mask:
    """A boolean tensor that hides keys.

    Attributes:
        root: the tensor, before it is negated and gets further axes.
        hides: True if True stands for a hidden key, False if for a visible one.
        new_axes: the axes that each Unsqueeze after the root adds.
    """

    root: str
    hides: bool
    new_axes: tuple[tuple[int, ...], ...]


@dataclass
class Attention:
    """An attention that was found.

    Attributes:
        name: of the softmax's node.
        softmax: its output.
        node: the product with the values, which the operator replaces.
        values: the values.
        products: the terms of the scores.
        masks: those before the softmax.
        means_without_keys: whether a query that sees no key gets the mean of all values, if its
            scores are all the same: they are finite, and its weights are not set to 0.
    """

    name: str
    softmax: str
    node: onnx.NodeProto
    values: str
    products: list[Product] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    means_without_keys: bool = True

    @property
    def content(self) -> Product:
        return next(x for x in self.products if x.shifted == x.output)

    @property
    def position(self) -> Product:
        return next(x for x in self.products if x.shifted != x.output)


def find(graph: Graph) -> Iterator[tuple[Attention, Refused | None]]:
    """Yield each attention, and the reason why it is not replaced if that is known by now."""
    for node in graph.nodes:
        if node.op_type != "MatMul":
            continue
        found = _weights(graph, node.input[0])
        if found is None:
            continue
        softmax, after = found
        attention = Attention(softmax.name or softmax.output[0], softmax.output[0], node, node.input[1])
        try:
            _read_softmax(graph, attention, softmax, after)
        except Refused as refused:
            yield attention, refused
        else:
            yield attention, None


def _weights(graph: Graph, name: str) -> tuple[onnx.NodeProto, list[onnx.NodeProto]] | None:
    """Return the softmax that makes the weights, and each Dropout and Where between that sets
    weights to 0."""
    after: list[onnx.NodeProto] = []
    while (node := graph.producer(name)) is not None:
        if node.op_type == "Softmax":
            return node, after
        if node.op_type in ("Identity", "Dropout", "Cast"):
            after += [node] * (node.op_type == "Dropout")
            name = node.input[0]
        elif node.op_type == "Where" and graph.scalar(node.input[1]) == 0:
            after.append(node)
            name = node.input[2]
        elif node.op_type == "Where" and graph.scalar(node.input[2]) == 0:
            after.append(node)
            name = node.input[1]
        else:
            return None
    return None


def _read_softmax(graph: Graph, attention: Attention, softmax: onnx.NodeProto, after: list[onnx.NodeProto]) -> None:
    axis = attribute(softmax, "axis", -1)
    if axis not in (-1, 3):
        raise Refused(f"its softmax is along axis {axis}, not the last of four")
    _read(graph, softmax.input[0], 1.0, attention)
    moved = [x for x in attention.products if x.shifted != x.output]
    if not moved:
        raise Refused(NO_POSITIONS, concerns=False)
    if len(attention.products) != 2 or len(moved) != 1:
        count = len(attention.products) - len(moved)
        raise Refused(f"its scores have to be a product and a shifted one, but are {count} and {len(moved)} shifted")
    attention.means_without_keys &= bool(attention.masks)
    for node in after:
        if node.op_type == "Dropout":
            if any(node.input[2:]) and graph.scalar(node.input[2]) != 0:
                raise Refused(f"its weights have a Dropout, {label(node)}, whose training_mode is not constant false")
            continue
        test = graph.producer(node.input[0])
        if test is not None and test.op_type == "IsNaN" and test.input[0] == attention.softmax:
            continue
        attention.means_without_keys = False
        mask = _mask(graph, node.input[0])
        hides = mask.hides if graph.scalar(node.input[1]) == 0 else not mask.hides
        same = Mask(mask.root, hides, mask.new_axes)
        if same not in attention.masks:
            raise Refused("a mask after its softmax is none of those before")


def _read(graph: Graph, name: str, scale: float, attention: Attention) -> None:
    """Read what a tensor adds to the scores, as a term multiplied by a number."""
    node = graph.producer(name)
    if node is None:
        raise Refused(f"its scores add {name}, an input of the graph or a constant")
    kind = node.op_type
    if kind == "Add":
        for term in node.input:
            if not _is_constant_mask(graph, term, scale, attention):
                _read(graph, term, scale, attention)
    elif kind in ("Mul", "Div"):
        factor, other = _scaling(graph, node)
        _read(graph, other, scale * factor, attention)
    elif kind in ("Cast", "Identity"):
        if kind == "Cast" and attribute(node, "to") != onnx.TensorProto.FLOAT:
            raise Refused("its scores are not float32")
        _read(graph, node.input[0], scale, attention)
    elif kind == "Where":
        filled = [n for n in (1, 2) if _hides(graph, node.input[n], scale)]
        if not filled:
            raise Refused(
                f"a Where in its scores, {label(node)}, does not hide keys: it has no constant that sets a score to "
                f"{HIDDEN:g} or less"
            )
        _add_mask(graph, attention, node, filled[0], scale)
        _read(graph, node.input[3 - filled[0]], scale, attention)
    elif kind == "MatMul" or kind in MOVES:
        attention.products.append(_product(graph, name, scale))
    else:
        raise Refused(f"its scores are made by {kind}, {label(node)}, which the operator does not have")


def _product(graph: Graph, name: str, scale: float) -> Product:
    """Return the product whose elements a tensor has."""
    moved, factor = name, 1.0
    while (node := graph.producer(name)) is not None and node.op_type != "MatMul":
        if node.op_type in ("Mul", "Div"):
            more, name = _scaling(graph, node)
            factor *= more
        elif node.op_type == "Concat":
            [*sources] = (x for x in node.input if not _is_filler(graph, x))
            if len(sources) != 1:
                raise Refused(
                    f"its scores have a Concat, {label(node)}, of {len(sources)} tensors that are not constant"
                )
            [name] = sources
        elif node.op_type in MOVES:
            name = node.input[0]
        else:
            raise Refused(f"its scores are made by {node.op_type}, {label(node)}, which the operator does not have")
    if node is None:
        raise Refused(f"its scores add {name}, an input of the graph or a constant")
    return Product(node, moved, factor, scale)


def _is_filler(graph: Graph, name: str) -> bool:
    """Whether a tensor is filled with a constant."""
    node = graph.producer(name)
    while node is not None and node.op_type in ("Expand", "Cast", "Identity", "Reshape"):
        name = node.input[0]
        node = graph.producer(name)
    return (node is not None and node.op_type in ("ConstantOfShape", "Constant")) or name in graph.initializers


def _scaling(graph: Graph, node: onnx.NodeProto) -> tuple[float, str]:
    """Return the number by which a Mul or Div multiplies a tensor, and the tensor."""
    first, second = (graph.scalar(x) for x in node.input)
    if second is not None and not (node.op_type == "Div" and second == 0):
        return (second if node.op_type == "Mul" else 1 / second), node.input[0]
    if first is not None and node.op_type == "Mul":
        return first, node.input[1]
    raise Refused(f"its scores have a {node.op_type}, {label(node)}, by what is not a constant number")


def _fill(graph: Graph, name: str) -> float | None:
    """Return the number with which a constant is filled, or None."""
    node = graph.producer(name)
    while node is not None and node.op_type in ("Expand", "Cast"):
        name = node.input[0]
        node = graph.producer(name)
    return graph.scalar(name)


def _hides(graph: Graph, name: str, scale: float) -> bool:
    """Whether a tensor is a constant that hides keys as a score that is multiplied by a number."""
    fill = _fill(graph, name)
    return fill is not None and fill * scale <= HIDDEN * (1 - 1e-6)


def _is_constant_mask(graph: Graph, name: str, scale: float, attention: Attention) -> bool:
    """Whether a term of the scores is a Where of 0 for visible keys and a number that hides the
    others. It is added to the attention's masks."""
    node = graph.producer(name)
    while node is not None and node.op_type in ("Cast", "Identity"):
        node = graph.producer(node.input[0])
    if node is None or node.op_type != "Where":
        return False
    for zero, hidden in ((1, 2), (2, 1)):
        if graph.scalar(node.input[zero]) == 0 and _hides(graph, node.input[hidden], scale):
            _add_mask(graph, attention, node, hidden, scale)
            return True
    return False


def _add_mask(graph: Graph, attention: Attention, node: onnx.NodeProto, hidden: int, scale: float) -> None:
    """Add a Where's mask to an attention's.

    hidden: the input with the number that hides keys. scale: by which that is multiplied.
    """
    mask, fill = _mask(graph, node.input[0]), _fill(graph, node.input[hidden])
    attention.masks.append(mask if hidden == 1 else Mask(mask.root, not mask.hides, mask.new_axes))
    attention.means_without_keys &= fill is not None and math.isfinite(fill * scale)


def _mask(graph: Graph, name: str) -> Mask:
    """Return a boolean tensor as a mask that hides keys where it is True."""
    hides, added = True, []
    while (node := graph.producer(name)) is not None:
        is_zero = node.op_type == "Equal" and graph.scalar(node.input[1]) == 0 and _is_flag(graph, node.input[0])
        if node.op_type == "Not" or is_zero:
            hides = not hides
        elif node.op_type == "Unsqueeze":
            axes = graph.constant(node.input[1]) if len(node.input) > 1 else None
            if axes is None:
                break
            added.append(tuple(int(x) for x in axes.reshape(-1)))
        elif not (node.op_type == "Identity" or (node.op_type == "Cast" and _is_flag(graph, node.input[0]))):
            break
        name = node.input[0]
    return Mask(name, hides, tuple(added[::-1]))


def _is_flag(graph: Graph, name: str) -> bool:
    """Whether a tensor is boolean, or one of numbers that a Cast has made of booleans."""
    node = graph.producer(name)
    while node is not None and node.op_type in ("Cast", *MOVES):
        name = node.input[0]
        node = graph.producer(name)
    if node is not None:
        return node.op_type in ("And", "Or", "Not", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Xor")
    types = [x.type.tensor_type.elem_type for x in graph.model.graph.input if x.name == name]
    return types == [onnx.TensorProto.BOOL]


def label(node: onnx.NodeProto) -> str:
    return str(node.name or node.output[0])
