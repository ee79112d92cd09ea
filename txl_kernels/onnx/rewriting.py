"""The rewriting of a model: each attention that was found is checked in the record of a run,
replaced, and compared with the record."""

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import as_strided

from txl_kernels.onnx import trial
from txl_kernels.onnx.graph import MAX_CONSTANT, PLACED, SIZES, Graph, constant_of, inner_graphs, inputs_of
from txl_kernels.onnx.replacement import Operands, Writer, bounds, operands, operator, shapes
from txl_kernels.onnx.report import Report, Row
from txl_kernels.onnx.scores import MOVES, Attention, Mask, Refused, find, label

MIN_OPSET = 13
TOLERANCE = 1e-4  # of outputs, relative to the largest value
# Operators that may do something else with sizes beyond a constant.
LIMITING = (
    "Clip", "Min", "Max", "Mod", "Div", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Where",
)  # fmt: skip
MAX_LIMIT = 8192  # of constants to which sizes are compared
MARGIN = 2  # of a length beyond a constant: its largest distance is beyond it, too
NO_SIZE = 2**31 - 1  # a constant that no size reaches, as at the end of a Slice
MAX_SCORES = 2**29  # of a run of the shift alone
MaskBounds = dict[Mask, tuple[Writer, tuple[str, str]]]


def rewritten(model: Any, inputs: Sequence[Mapping[str, Any]] | None, folder: str | os.PathLike[str]) -> Report:
    """See `txl_kernels.onnx.rewrite`."""
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model must be an onnx.ModelProto (of onnx.load), got {type(model).__name__}")
    is_runs = isinstance(inputs, Sequence) and bool(inputs) and all(isinstance(x, Mapping) for x in inputs)
    if inputs is not None and not is_runs:
        raise TypeError(
            f"inputs must be None, or a sequence with a dictionary of arrays for each run, got {reprlib.repr(inputs)}"
        )
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"folder must be a path, got {folder!r}")
    graph = Graph(model, os.fspath(folder))
    if graph.opset() < MIN_OPSET:
        raise ValueError(f"model must have opset {MIN_OPSET} or newer, got {graph.opset()}")
    found = list(find(graph))
    read = [attention for attention, refused in found if refused is None]
    runs = trial.run(graph, {name for x in read for name in _recorded(graph, x)}, inputs) if read else []
    rows: list[Row] = []
    limits: MaskBounds = {}
    for number, (attention, refused) in enumerate(found, graph.free_number()):
        try:
            if refused is not None:
                raise refused
            _replace(graph, attention, runs, f"txl/{number}", limits)
        except Refused as error:
            rows.append(Row(attention.name, str(error), error.concerns))
        else:
            rows.append(Row(attention.name))
    if any(row.reason is None for row in rows):
        graph.store()
    return Report(tuple(rows))


def _recorded(graph: Graph, attention: Attention) -> list[str]:
    """Return the tensors that the checks and the replacement read."""
    given, products = operands(graph, attention), attention.products
    _, others = _subgraph(graph, attention, given)
    names = [*given.names(), *others, *(x.root for x in attention.masks), *_shift(graph, attention)[1]]
    factors = [name for x in products for name in x.node.input]
    return [*names, *factors, attention.values, attention.position.output]


def _subgraph(graph: Graph, attention: Attention, given: Operands) -> tuple[list[onnx.NodeProto], list[str]]:
    """Return the nodes by which an attention depends on its operands and masks, and what else they
    read."""
    ends = [attention.node.output[0], *_cleared_outputs(graph, attention)]
    return graph.nodes_between(given.names(), ends, [x.root for x in attention.masks])


def _replace(graph: Graph, attention: Attention, runs: list[trial.Arrays], prefix: str, limits: MaskBounds) -> None:
    """Replace an attention in the graph, or raise `Refused` and leave the graph as it is."""
    content, position, output = attention.content, attention.position, attention.node.output[0]
    given = operands(graph, attention)
    for record in runs:
        _check_tensors(record, attention)
    _check_sizes(graph, [record[position.output].shape for record in runs])
    _check_settings(graph, attention, given)
    _check_longer(graph, attention, runs)
    alone, _ = _subgraph(graph, attention, given)
    drawn = [record | _draw(record, given) for record in runs]
    drawn += [x | _draw_masks(graph, x, attention, n) for n, x in enumerate([*drawn, *drawn])]
    names = [output, position.output, position.shifted, *_cleared_outputs(graph, attention)]
    wanted = trial.run_nodes(graph, alone, drawn, names)
    for result in wanted:
        _check_shift(result[position.output], result[position.shifted], position.factor)
    writer, new = Writer(graph, prefix), []
    own: list[tuple[str, str]] = []
    made: MaskBounds = {}
    for n, mask in enumerate(dict.fromkeys(attention.masks)):
        if mask not in limits:
            of_mask = Writer(graph, f"{prefix}/mask_{n}")
            made[mask] = of_mask, bounds(of_mask, mask, runs[0][mask.root].ndim)
            new += of_mask.nodes
        own.append((limits | made)[mask][1])
    sizes = [(x[attention.values].shape[2], *x[position.output].shape[2:]) for x in runs]  # keys, queries, rows
    has_memory = any(keys > queries for keys, queries, _ in sizes)
    is_longer = any(rows > keys + queries - 1 for keys, queries, rows in sizes)
    is_one = any(x[position.node.input[1]].shape[0] < x[position.output].shape[0] for x in runs)
    if not is_one and graph.has_values(position.node.input[1]):
        raise Refused("its table of positions may differ between batch rows: it depends on values of the inputs")
    node = operator(writer, attention, given, own, has_memory, is_longer, is_one)
    new += writer.nodes
    earlier = [x for mask in dict.fromkeys(attention.masks) if mask in limits for x in limits[mask][0].nodes]
    try:
        found = trial.run_nodes(graph, [*earlier, *new], drawn, [node.output[0]])
    except Exception as error:
        raise Refused(f"the operator refuses its inputs: {error}") from error
    for inputs, got, result in zip(drawn, found, wanted, strict=True):
        out = got[node.output[0]]
        out = out if node is attention.node else out.transpose(0, 2, 1, 3)
        _compare(out, result[output], inputs[given.values.root], *_unused(graph, inputs, result, attention))
    replaced = {node.output[0]: new}
    for x in given.views:
        replaced |= shapes(graph, writer, x)
    nodes = graph.replace(replaced)
    alive = {name for node in nodes for name in node.output}
    if {attention.softmax, position.output, content.output} & alive:
        between, _ = graph.nodes_between(given.names(), [output])
        inner = {name for node in between for name in node.output} - {output}
        used = {x.op_type for x in nodes if inner.intersection(inputs_of(x)) and not inner.intersection(x.output)}
        raise Refused(
            f"its scores or weights are used elsewhere, by {' and '.join(sorted(used)) or 'an output of the graph'}"
        )
    graph.set_nodes(nodes)
    limits |= made


def _check_tensors(record: trial.Arrays, attention: Attention) -> None:
    """Check the shapes and types of an attention's tensors in the record of a run."""
    factors = (*attention.content.node.input, *attention.position.node.input, attention.values)
    tensors = [record[x] for x in factors]
    query, keys, query_position, rows, values = (list(x.shape) for x in tensors)
    if any(x.dtype != np.float32 for x in tensors):
        raise Refused(f"its tensors have to be float32, got {sorted({str(x.dtype) for x in tensors})}")
    if {len(query), len(keys), len(rows), len(values)} != {4}:
        raise Refused(f"its tensors have to be [B, H, L, D], got {query}, {keys}, {rows} and {values}")
    (batch, heads, length, width), total = query, keys[3]
    if keys != [batch, heads, width, total] or values[:3] != [batch, heads, total] or total < length:
        raise Refused(f"queries {query} do not fit keys {keys} and values {values}")
    if query_position[:3] != query[:3] or rows[0] not in (1, batch) or rows[1] != heads:
        raise Refused(f"queries {query_position} do not fit the table of positions {rows}")
    if (tensors[3] != tensors[3][:1]).any():
        raise Refused("its table of positions is not the same for all batch rows")
    if rows[3] < length + total - 1:
        raise Refused(
            f"its table of positions has {rows[3]} rows, but {length} queries of {total} keys need {length + total - 1}"
        )
    for mask in attention.masks:
        root = record[mask.root]
        if root.dtype != bool:
            raise Refused(f"its mask {mask.root} has to be boolean, got {root.dtype}")


def _draw(record: trial.Arrays, given: Operands) -> trial.Arrays:
    """Return random operands of an attention, with the shapes of a record; a table that is the same
    for all batch rows. The model's own could be all alike."""
    rng = np.random.default_rng(0)
    drawn: trial.Arrays = {}
    for name, is_table in given.names().items():
        shape = record[name].shape
        values = rng.standard_normal((1, *shape[1:]) if is_table else shape, dtype=np.float32)
        drawn[name] = np.broadcast_to(values, shape).copy()
    return drawn


def _draw_masks(graph: Graph, record: trial.Arrays, attention: Attention, number: int) -> trial.Arrays:
    """Return random masks of an attention, with the shapes of a record, but for those that depend
    on sizes alone: a query sees all keys, some consecutive ones, or none.

    number: that of the drawing.
    """
    rng = np.random.default_rng(number)
    drawn: trial.Arrays = {}
    for mask in dict.fromkeys(attention.masks):
        if not graph.has_values(mask.root) or mask.root in drawn:
            continue
        *shape, keys = record[mask.root].shape
        first, last = np.sort(rng.integers(0, keys + 1, (2, *shape, 1)), axis=0)
        kind = np.arange(first.size).reshape(first.shape) + (rng.integers(4, size=first.shape) if drawn else number)
        last = np.where(kind % 4 == 0, first, last)
        seen = (np.arange(keys) >= first) & (np.arange(keys) < last) | (kind % 4 == 1)
        drawn[mask.root] = ~seen if mask.hides else seen
    return drawn


def _settings(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """Return the tensors that nodes read as positions and sizes."""
    moving = [x for x in nodes if x.op_type in PLACED or (x.op_type in MOVES and x.op_type != "Concat")]
    return [name for x in moving for name in x.input[PLACED.get(x.op_type, 1) :] if name]


def _check_settings(graph: Graph, attention: Attention, given: Operands) -> None:
    """Check that nothing but an attention's operands and masks depends on values, of which the runs
    show some alone, and that no inner graph, which is not read, computes it."""
    nodes, others = _subgraph(graph, attention, given)
    settings = dict.fromkeys([*_settings(nodes), *others])
    if graph.has_values(*settings):
        name = next(name for name in settings if graph.has_values(name))
        moves, more = graph.nodes_between([attention.position.output], [attention.position.shifted])
        what = "shift" if name in [*_settings(moves), *more] else "output"
        raise Refused(f"its {what} depends on {name}, which depends on values of the inputs")
    for name in graph.origins(settings):
        for node in graph.inside(graph.producers[name]) if name in graph.producers else ():
            if inner_graphs(node):
                raise Refused(f"its shift depends on {node.op_type}, {label(node)}, whose inner graphs are not read")


def _shift(graph: Graph, attention: Attention) -> tuple[list[onnx.NodeProto], list[str], list[str]]:
    """Return the nodes of an attention's shift, those that compute its positions included; what
    else they read; and those of them that are sizes of tensors which the nodes do not make."""
    position = attention.position
    nodes, others = graph.nodes_between([position.output], [position.shifted])
    made = {name for node in nodes for name in node.output}
    before = [
        node for name in graph.origins([*_settings(nodes), *others]) if (node := graph.producer(name)) is not None
    ]
    sizes = [x.output[0] for x in before if x.op_type in SIZES and x.output[0] not in made]
    nodes, others = graph.nodes_between([position.output, *sizes], [position.shifted])
    read = {name for node in nodes for name in graph.names(node)[0]}
    sizes = [name for name in sizes if name in read]
    return nodes, [*sizes, *others], sizes


def _check_longer(graph: Graph, attention: Attention, runs: list[trial.Arrays]) -> None:
    """Check the shift of an attention, alone, at a length beyond each constant that may change what
    it does: the runs show their lengths alone."""
    position = attention.position
    shapes = [x[position.output].shape for x in runs]
    axis = 2 if len({shape[2] for shape in shapes}) > 1 else 3
    lengths, batches = [shape[axis] for shape in shapes], [shape[0] for shape in shapes]
    if len(set(lengths)) == 1:
        return
    nodes, given, sizes = _shift(graph, attention)
    values = {name: runs[0][name] for name in given if name not in sizes}
    constants = {name: graph.constant(name, NO_SIZE) for node in nodes for name in graph.names(node)[0]} | values
    large = [name for name, x in constants.items() if x is not None and x.size > MAX_CONSTANT]
    if large:
        raise Refused(f"its shift reads {large[0]}, a constant of which the runs show a part")
    limits = _limits(graph, nodes, constants)
    measured = [name for x in sizes for name in graph.producers[x].input]
    before = [graph.producer(name) for name in graph.origins((), measured, placed=True)]
    limits_of_sizes = _limits(graph, [node for node in before if node is not None], {})
    for limit, reader in sorted((limits_of_sizes | limits).items()):
        length = limit + MARGIN
        if length <= max(lengths):
            continue
        where = f"at a length of {length}, beyond the constant {limit} of {reader}"
        known = [
            x
            for of_runs in ([np.array(x) for x in shapes], *([x[name] for x in runs] for name in sizes))
            if (x := _longer(of_runs, lengths, batches, length)) is not None
        ]
        is_known = limit in limits and len(known) == 1 + len(sizes)
        if not is_known or limit > MAX_LIMIT or np.prod(known[0]) > MAX_SCORES:
            raise Refused(f"its shift cannot be checked {where}: give rewrite inputs as long")
        values |= dict(zip([position.output, *sizes], known, strict=True))
        values[position.output] = np.random.default_rng(0).random(known[0].tolist(), dtype=np.float32)
        try:
            [shifted] = (x[position.shifted] for x in trial.run_nodes(graph, nodes, [values], [position.shifted]))
            _check_shift(values[position.output], shifted, position.factor)
        except Exception as error:
            raise Refused(f"{error}, {where}") from error


def _limits(
    graph: Graph, nodes: Sequence[onnx.NodeProto], constants: Mapping[str, np.ndarray[Any, Any] | None]
) -> dict[int, str]:
    """Return the constants of nodes that limit sizes or compare to them, each with such a node.

    constants: those that are known; for other names the graph's small ones.
    """
    limits: dict[int, str] = {}
    for node in nodes:
        inside = list(graph.inside(node))
        if all(x.op_type not in LIMITING for x in inside):
            continue
        numbers = [constant_of(x) for x in inside if x.op_type == "Constant"]
        for x in (*numbers, *(constants.get(name, graph.constant(name)) for name in inputs_of(node))):
            if x is not None and x.size and x.dtype.kind in "iuf":
                largest = np.nan_to_num(np.abs(x.astype(np.float64))).max()
                if largest < NO_SIZE:
                    limits[math.ceil(largest)] = f"{node.op_type}, {label(node)}"
    return limits


def _longer(
    sizes: list[np.ndarray[Any, Any]], lengths: list[int], batches: list[int], length: int
) -> np.ndarray[Any, Any] | None:
    """Return sizes at a batch of one row and another length, or None if they are no multiple of the
    batch and no linear function of the length.

    sizes, lengths, batches: those of the runs.
    """
    first, last = int(np.argmin(lengths)), int(np.argmax(lengths))
    found = []
    if len({x.shape for x in sizes}) > 1:
        return None
    for of_runs in zip(*(x.reshape(-1).tolist() for x in sizes), strict=True):
        for rows in (batches, [1] * len(batches)):
            each, rest = zip(*(divmod(x, n) for x, n in zip(of_runs, rows, strict=True)), strict=True)
            slope, more = divmod(each[last] - each[first], lengths[last] - lengths[first])
            line = [each[first] + slope * (x - lengths[first]) for x in (*lengths, length)]
            if not any(rest) and not more and list(each) == line[:-1]:
                found.append(line[-1])
                break
        else:
            return None
    return np.array(found, np.int64).reshape(sizes[0].shape)


def _check_shift(before: Any, after: Any, factor: float) -> None:
    """Check that each score of positions has moved to the column of its distance.

    before: the scores [B, H, L, T] of rows in descending order of their distance. after: [B, H, L,
    S], multiplied by the factor.
    """
    length, total = after.shape[2:]
    if after.shape[:3] != before.shape[:3] or length + total - 1 > before.shape[3]:
        raise Refused(f"scores of {list(before.shape)} become {list(after.shape)}, which is no relative shift")
    *outer, row, column = before.strides
    wanted = as_strided(before[..., length - 1 :], after.shape, (*outer, row - column, column))
    if not np.allclose(after, factor * wanted, rtol=1e-6, atol=0):
        raise Refused("it does not move each score of positions to the column of its distance")


def _check_sizes(graph: Graph, shapes: list[tuple[int, ...]]) -> None:
    """Check that the runs have had several batch rows and lengths, where the model takes any.

    shapes: those of the scores of positions [B, H, L, T].
    """
    sizes = [list(x.type.tensor_type.shape.dim) for x in graph.model.graph.input if x.name not in graph.initializers]
    is_any = [[not size.HasField("dim_value") for size in axes] for axes in sizes]
    if any(axes[0] for axes in is_any if axes) and max(shape[0] for shape in shapes) < 2:
        raise Refused("all runs have one batch row, but the model takes any number: give rewrite inputs with two")
    if any(any(axes[1:]) for axes in is_any) and len({shape[2:] for shape in shapes}) < 2:
        length = shapes[0][2]
        raise Refused(
            f"all runs have {length} queries, but the model takes any number: give rewrite inputs of two lengths"
        )


def _cleared_outputs(graph: Graph, attention: Attention) -> list[str]:
    """Return the outputs of the Where nodes that set parts of an attention's output to 0; none if
    others read it, too."""
    name = attention.node.output[0]
    readers = [x for x in graph.consumers.get(name, []) if x.op_type != "Shape"]
    for x in readers:
        if x.op_type != "Where" or all(graph.scalar(y) != 0 for y in x.input[1:] if y != name):
            return []
    return [] if name in graph.outputs else [x.output[0] for x in readers]


def _sees_no_key(record: trial.Arrays, attention: Attention) -> np.ndarray[Any, Any]:
    """Return whether a query sees no key, [B or 1, 1, L or 1, 1]."""
    seen: np.ndarray[Any, Any] = np.ones((1, 1, 1, 1), bool)
    for mask in attention.masks:
        root = record[mask.root]
        for new in mask.new_axes:
            root = np.expand_dims(root, new)
        seen = seen & (~root if mask.hides else root)
    return np.asarray(~seen.any(-1, keepdims=True))


def _unused(graph: Graph, inputs: trial.Arrays, result: trial.Arrays, attention: Attention) -> tuple[Any, Any]:
    """Return which queries see no key; and where the operator's output may be another: there, if
    the graph's is not a number, or all that reads it is a Where that sets it to 0."""
    blind, wanted = _sees_no_key(inputs, attention), result[attention.node.output[0]]
    later = [result[x] for x in _cleared_outputs(graph, attention)]
    return blind, blind & (np.isnan(wanted) | (bool(later) and not any((blind & (x != 0)).any() for x in later)))


def _compare(got: Any, wanted: Any, values: Any, blind: Any, unused: Any) -> None:
    """Compare the output of the new nodes with that of the graph, both for these values."""
    if got.shape != wanted.shape:
        raise Refused(f"the operator's output is {list(got.shape)}, not {list(wanted.shape)}")
    differences = np.where(unused, 0, np.nan_to_num(np.abs(got - wanted), nan=np.inf))
    allowed = TOLERANCE * max(1.0, float(np.abs(values).max(initial=0)))
    difference = np.where(blind, 0, differences).max(initial=0)
    if not difference <= allowed:
        raise Refused(f"the operator's output differs by {difference:.1e}, more than {allowed:.1e}")
    if not differences.max(initial=0) <= allowed:
        raise Refused("a query that sees no key gets neither 0 nor the mean of all values")
