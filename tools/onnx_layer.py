"""Times one attention layer of Parakeet's size in ONNX Runtime: `txl::RelAttention`, or the graph
that NeMo's exporter writes, whose relative shift is Pad, Reshape and Slice.

    python tools/onnx_layer.py operator|exported [FRAMES]

Each needs a process of its own, since it prints by how much the process has grown.
"""

import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from txl_kernels.onnx import library

HEADS, WIDTH, THREADS = 8, 128, 2


def inputs_of(frames: int) -> dict[str, Any]:
    """Return float32 inputs; row frames - 1 + d of r belongs to distance d."""
    rng = np.random.default_rng(0)
    shapes = dict.fromkeys("qkv", (1, HEADS, frames, WIDTH)) | {"r": (HEADS, 2 * frames - 1, WIDTH)}
    shapes |= dict.fromkeys("uw", (HEADS, WIDTH))
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def exported(frames: int) -> tuple[list[Any], list[Any]]:
    """Return nodes and constants of the exported graph. Its r is in descending order."""
    constants = {
        "biases": [HEADS, 1, WIDTH], "pads": [0, 0, 0, 1, 0, 0, 0, 0], "padded": [1, HEADS, 2 * frames, frames],
        "one": [1], "end": [2 * frames], "axis2": [2], "shifted": [1, HEADS, frames, 2 * frames - 1], "zero": [0],
        "keys": [frames], "axis3": [3], "scale": np.float32(WIDTH**-0.5),
    }  # fmt: skip
    lines = """Reshape u biases -> u3; Reshape w biases -> w3; Add q u3 -> qu; Add q w3 -> qw; Transpose k -> kt perm 0 1 3 2
        MatMul qu kt -> content; Transpose r -> rt perm 0 2 1; MatMul qw rt -> p0; Pad p0 pads -> p1
        Reshape p1 padded -> p2; Slice p2 one end axis2 -> p3; Reshape p3 shifted -> p4; Slice p4 zero keys axis3 -> p5
        Add content p5 -> sum; Mul sum scale -> scores; Softmax scores -> weights; MatMul weights v -> out"""
    nodes = []
    for line in lines.replace("\n", ";").split(";"):
        before, after = line.split(" -> ")
        (kind, *inputs), (output, *perm) = before.split(), after.split()
        nodes.append(helper.make_node(kind, inputs, [output], **({"perm": [int(x) for x in perm[1:]]} if perm else {})))
    return nodes, [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]


def session_of(which: str, inputs: dict[str, Any]) -> Any:
    nodes, constants = exported(inputs["q"].shape[2])
    if which == "operator":
        nodes, constants = [helper.make_node("RelAttention", list("qkvruw"), ["out"], domain="txl", causal=0)], []
    kind = onnx.TensorProto.FLOAT
    declared = [helper.make_tensor_value_info(name, kind, x.shape) for name, x in inputs.items()]
    out = helper.make_tensor_value_info("out", kind, inputs["q"].shape)
    graph = helper.make_graph(nodes, "layer", declared, [out], constants)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("txl", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    options.register_custom_ops_library(library())
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(which: str, frames: int) -> Any:
    """Print the median time of five runs and the memory grown; return the output."""
    inputs = inputs_of(frames)
    given = inputs | ({"r": np.ascontiguousarray(inputs["r"][:, ::-1])} if which == "exported" else {})
    session = session_of(which, inputs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [out] = session.run(None, given)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        session.run(None, given)
        times.append(time.perf_counter() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{which}, {frames} frames: {1e3 * statistics.median(times):.0f} ms, {grown:.0f} MiB grown")
    return out


if __name__ == "__main__":
    if sys.argv[1:2] not in (["operator"], ["exported"]):
        raise SystemExit(__doc__)
    run(sys.argv[1], int((sys.argv[2:] or ["1500"])[0]))
