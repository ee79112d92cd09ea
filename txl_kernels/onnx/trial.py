"""Runs of a model on small inputs, which record the tensors of its attentions, and of nodes alone
on such a record."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from txl_kernels.onnx.graph import SIZES, Graph, attribute, inputs_of
from txl_kernels.onnx.library import library

Arrays = dict[str, np.ndarray[Any, Any]]
RUNS = ((2, 131), (3, 203), (1, 97))  # batch rows and frames of the runs
SHORTENED = 8  # by how much a model may shorten these frames; for others there are more
STRIDED = ("Conv", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool", "LpPool")


def run(graph: Graph, names: Collection[str], inputs: Sequence[Mapping[str, Any]] | None) -> list[Arrays]:
    """Return the values of tensors of the model in some runs, the model's inputs included.

    inputs: those of the runs; None for random ones.

    Raises:
        RuntimeError: the model could not be run; the message has the runtime's.
    """
    constants = {x: graph.value(x) for x in names if x in graph.initializers}
    wanted = sorted(set(names) - {x.name for x in graph.model.graph.input} - constants.keys())
    weights = graph.weights()
    try:
        session = _session(_with_outputs(graph, wanted, weights), graph.folder)
    except Exception as error:
        raise RuntimeError(
            f"ONNX Runtime could not load the model, which `rewrite` runs on small inputs: {error}"
        ) from error
    large = {name: numpy_helper.to_array(x) for name, x in weights.items()}
    if inputs is not None:
        try:
            return [constants | dict(given) | _results(session, wanted, {**large, **given}) for given in inputs]
        except Exception as error:
            raise RuntimeError(f"the model could not be run on inputs: {error}") from error
    scale = max(1, _shortening(graph, names) // SHORTENED)
    try:
        tried = [random_inputs(graph, batch, scale * frames) for batch, frames in RUNS]
        return [constants | given | _results(session, wanted, {**large, **given}) for given in tried]
    except Exception as error:
        raise RuntimeError(
            "the model could not be run on random inputs; give rewrite examples of its inputs "
            f"(inputs=[{{name: array}}, ...]): {error}"
        ) from error


def _shortening(graph: Graph, names: Collection[str]) -> int:
    """Return by how much strides shorten the model's inputs before tensors: the least of all ways
    there."""
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
    shortened = {x.name: 1 for x in graph.model.graph.input if x.type.tensor_type.elem_type in floats}
    for name in graph.initializers:
        shortened.pop(name, None)
    for node in graph.nodes:
        before = [shortened[x] for x in graph.names(node)[0] if x in shortened]
        if before and node.op_type not in SIZES:
            stride = min(attribute(node, "strides", [1])) if node.op_type in STRIDED else 1
            steps = graph.constant(node.input[4]) if node.op_type == "Slice" and len(node.input) > 4 else None
            stride = stride if steps is None else int(np.abs(steps).max(initial=1))
            shortened.update(dict.fromkeys(node.output, min(before) * stride))
    return min((shortened[x] for x in names if x in shortened), default=1)


def _with_outputs(graph: Graph, names: Sequence[str], weights: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """Return a copy of the model that gives further tensors, and whose weights are inputs: ONNX
    Runtime would copy constants several times, but not inputs."""
    model, of = onnx.ModelProto(), graph.model.graph
    model.ir_version = graph.model.ir_version
    model.opset_import.extend(graph.model.opset_import)
    model.functions.extend(graph.model.functions)
    copy = model.graph
    copy.name = of.name
    copy.node.extend(x for x in graph.nodes if graph.names(x)[1][0] not in weights)
    copy.input.extend(of.input)
    copy.input.extend(onnx.helper.make_tensor_value_info(name, x.data_type, x.dims) for name, x in weights.items())
    copy.initializer.extend(x for x in of.initializer if x.name not in weights)
    copy.sparse_initializer.extend(of.sparse_initializer)
    copy.output.extend(of.output)
    copy.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in graph.outputs)
    return model


def run_nodes(
    graph: Graph, nodes: Sequence[onnx.NodeProto], runs: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[Arrays]:
    """Return tensors that nodes compute of given values, in a model of their own. All runs give the
    same tensors, in different sizes."""
    made = {name for node in nodes for name in node.output}
    needed = dict.fromkeys(name for node in nodes for name in inputs_of(node) if name not in made)
    constants = [graph.initializers[x] for x in needed if x in graph.initializers and x not in runs[0]]
    given = [{name: np.asarray(values[name]) for name in needed if name in values} for values in runs]
    helper = onnx.helper
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for name, x in given[0].items()
    ]
    versions = [x for x in graph.model.opset_import if x.domain != "txl"] + [helper.make_opsetid("txl", 1)]
    small = helper.make_graph(nodes, "attention", declared, [onnx.ValueInfoProto(name=x) for x in names], constants)
    model = helper.make_model(
        small, opset_imports=versions, ir_version=graph.model.ir_version, functions=graph.model.functions
    )
    session = _session(model, graph.folder)
    return [_results(session, names, values) for values in given]


def random_inputs(graph: Graph, batch: int, frames: int) -> Arrays:
    """Return random arrays for the model's inputs.

    Raises:
        ValueError: the values of an input cannot be guessed.
    """
    rng = np.random.default_rng(frames)
    given: Arrays = {}
    inputs = [x for x in graph.model.graph.input if x.name not in graph.initializers]
    shapes = {x.name: _shape(x, batch, frames) for x in inputs}
    longest = (
        frames
        if any(frames in shape[1:] for shape in shapes.values())
        else max(map(max, filter(None, shapes.values())), default=0)
    )
    for x in inputs:
        shape, dtype = shapes[x.name], onnx.helper.tensor_dtype_to_np_dtype(x.type.tensor_type.elem_type)
        if np.issubdtype(dtype, np.floating):
            given[x.name] = rng.standard_normal(shape).astype(dtype)
            continue
        if not shape:
            raise ValueError(f"no values are known for the input {x.name}, {dtype} []")
        # The first batch row is full, the others are padded.
        full = 3 if "cache" in x.name else longest if len(shape) == 1 else shape[-1]
        lengths = np.array([full - full * row // (shape[0] + 1) for row in range(shape[0])])
        if len(shape) == 1:
            given[x.name] = lengths.astype(dtype)
        elif len(shape) == 2:
            given[x.name] = (np.arange(shape[1]) < lengths[:, None]).astype(dtype)
        else:
            raise ValueError(f"no values are known for the input {x.name}, {dtype} {list(shape)}")
    return given


def _shape(x: onnx.ValueInfoProto, batch: int, frames: int) -> tuple[int, ...]:
    return tuple(
        size.dim_value if size.HasField("dim_value") else (frames if axis else batch)
        for axis, size in enumerate(x.type.tensor_type.shape.dim)
    )


def _results(session: Any, names: Sequence[str], given: Mapping[str, Any]) -> Arrays:
    return dict(zip(names, session.run(names, dict(given)), strict=True)) if names else {}


def _session(model: onnx.ModelProto, folder: str) -> Any:
    """Return a session that keeps every tensor, without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # errors are raised, too
    options.intra_op_num_threads = 2
    options.enable_cpu_mem_arena = False  # a run beyond a constant is large: what it frees goes back
    options.register_custom_ops_library(library())
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 21):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    else:  # cannot be told the folder: gets what its files have
        stored = [x for x in model.graph.initializer if x.data_location == onnx.TensorProto.EXTERNAL]
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(numpy_helper.to_array(x, base_dir=folder)) for x in stored]
        options.add_external_initializers([x.name for x in stored], values)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
