"""ONNX models of one operator, inputs for it from the cases of `cases.py`, models that torch.onnx
exports with `translations`, and sessions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, detached, make_inputs
from torch import Tensor, float32

from txl_kernels import onnx as operator
from txl_kernels.checks import span

reason = "needs the extra `onnx`"
onnx = pytest.importorskip("onnx", reason=reason)
onnxruntime = pytest.importorskip("onnxruntime", reason=reason)

INPUTS = (
    "q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem", "start", "end", "q_pos", "r_bias", "sink",
)  # fmt: skip


def can_express(case: Case) -> bool:
    """Whether the operator has all that a case needs."""
    of_each_batch_row = str(case.given.get("r", "")).startswith("B")
    return not (case.dropout_p or case.chunk or case.prefix or of_each_batch_row)


def attributes_of(case: Case) -> dict[str, Any]:
    left, right = span(case.causal, case.window)
    found = {"causal": int(case.causal), "left": -1 if left is None else left, "right": -1 if right is None else right}
    found |= {"zero_row": case.zero_row, "r_descending": int(case.r_descending), "outside": case.outside}
    scales = {"scale": case.scale, "position_scale": case.position_scale, "softcap": case.softcap}
    return found | {name: float(x) for name, x in scales.items() if x}


def arrays_of(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Return the case's tensors as the operator's inputs; those that it does not have are left
    out."""
    inputs = detached(make_inputs(case, float32))
    return {name: np.ascontiguousarray(x.numpy()) for name in INPUTS if isinstance(x := inputs[name], Tensor)}


def model_of(
    arrays: dict[str, np.ndarray[Any, Any]],
    attributes: dict[str, Any],
    shapes: dict[str, Sequence[str | int]] | None = None,
) -> bytes:
    """Return a model of one node. Without shapes no input says its rank."""
    helper = onnx.helper
    names = [name if name in arrays else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    node = helper.make_node("RelAttention", names, ["out"], domain="txl", **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), (shapes or {}).get(name))
        for name, x in arrays.items()
    ]
    out = helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("txl", 1)]
    graph = helper.make_graph([node], "one_operator", inputs, [out])
    return bytes(helper.make_model(graph, opset_imports=domains, ir_version=9).SerializeToString())


def export(model: Any, args: Sequence[Any], shapes: Any = None, **options: Any) -> Any:
    """Return the program that torch.onnx writes of a model, or of a program of torch.export."""
    model = model.eval() if isinstance(model, torch.nn.Module) else model
    return torch.onnx.export(
        model, tuple(args), dynamo=True, dynamic_shapes=shapes, custom_translation_table=operator.translations(),
        verbose=False, **options,
    )  # fmt: skip


def outputs_of(program: Any, args: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    session = session_of(program.model_proto)
    tensors = [x.detach().numpy() for x in args if x is not None]
    names = [x.name for x in session.get_inputs()]
    outs: list[np.ndarray[Any, Any]] = session.run(None, dict(zip(names, tensors, strict=True)))
    return outs


def nodes_of(program: Any, kind: str = "RelAttention") -> list[Any]:
    return [node for node in program.model.graph if node.op_type == kind]


def session_of(model: Any, threads: int = 2) -> Any:
    """Return a session of a model, of its bytes, or of a file."""
    model = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised, too
    options.register_custom_ops_library(operator.library())
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
