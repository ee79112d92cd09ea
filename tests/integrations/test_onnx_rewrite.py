"""Exported encoders of other libraries, rewritten, against themselves."""

import collections
import copy
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_exports import (
    EXPORTS,
    OTHERS,
    exported,
    inputs_of,
    quiet,
    run,
    streaming,
    streaming_inputs,
    to_onnx,
)
from onnx_models import onnx, onnxruntime, session_of
from torch import Tensor, nn

from txl_kernels.onnx import rewrite, trial

MAX_DIFFERENCE = 1e-4
SIZES = ((1, 90), (2, 140), (4, 333))  # batch rows and frames


def kinds(model: Any) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph.node)


def transposes_beside_operators(model: Any) -> list[str]:
    """Return the Transposes that make an input of an operator, or read its output."""
    operators = [node for node in model.graph.node if node.op_type == "RelAttention"]
    inputs = {name for node in operators for name in node.input}
    outputs = {node.output[0] for node in operators}
    transposes = [node for node in model.graph.node if node.op_type == "Transpose"]
    return [node.name for node in transposes if node.output[0] in inputs or node.input[0] in outputs]


def assert_close(got: list[Any], wanted: list[Any], maximum: float = MAX_DIFFERENCE) -> None:
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=maximum)


# Another exporter of the same formulas takes a quarter of a minute.
SLOW = ("ESPnet, dynamo", "w2v-BERT, dynamo")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.nightly] * (x in SLOW)) for x in EXPORTS])
def test_rewritten_graph_computes_the_same(name: str) -> None:
    """In any batch and length, with padding, for all frames, those of padding included."""
    original, model = exported(name), exported(name)
    report = rewrite(model)
    assert [row.done for row in report.rows] == ["replaced", "replaced"], report
    assert kinds(model)["RelAttention"] == 2
    assert kinds(model)["ArgMax"] == 2, "bounds of the mask that both layers have"
    assert not kinds(model)["Softmax"]
    # NeMo's SDPA multiplies queries and keys by a factor that the graph computes from a size.
    assert not transposes_beside_operators(model) or name == "NeMo, SDPA"
    before, after = session_of(original), session_of(model)
    for batch, frames in SIZES:
        given = inputs_of(EXPORTS[name], batch, frames)
        wanted = before.run(None, given)
        assert_close(after.run(None, given), wanted)
        assert np.ptp(wanted[0], axis=EXPORTS[name].time).max() > 0.1, "the encoder's output depends on its frames"


@pytest.mark.parametrize("name", ["NeMo, limited context", "Parakeet", "ESPnet"])
def test_fixed_batch_and_length(name: str, tmp_path: Path) -> None:
    """Also where ONNX Runtime has replaced what does not depend on inputs by initializers."""
    tensors = {key: torch.from_numpy(x) for key, x in inputs_of(EXPORTS[name], 2, 200).items()}
    graph = to_onnx(EXPORTS[name].make(), tensors, {})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    plain, folded = onnx.load_from_string(graph), onnx.load(tmp_path / "folded.onnx")
    assert len(folded.graph.node) < len(plain.graph.node)
    given = inputs_of(EXPORTS[name], 2, 200)
    wanted = run(onnx.load_from_string(graph), given)
    for model in (plain, folded):
        report = rewrite(model)
        assert len(report.replaced) == 2, report
        assert_close(run(model, given), wanted)


def test_operator_reads_queries_without_the_biases_of_heads() -> None:
    """Those are inputs of their own: no Add makes two queries, and no Transpose stays for Shape."""
    model = exported("NeMo")
    before = kinds(model)
    rewrite(model)
    after = kinds(model)
    for node in model.graph.node:
        if node.op_type == "RelAttention":
            assert [x.split(".")[-1] for x in node.input[4:6]] == ["pos_bias_u", "pos_bias_v"]
            assert len(node.input) == 10, "no q_pos"
    assert before["Transpose"] - after["Transpose"] == 2 * 7  # q, k, v, r, those of the shift, and the output
    assert before["Add"] - after["Add"] == 2 * 3 - 2  # both biases and the scores; the new bounds have two


def test_the_runs_copy_no_weights_and_load_few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime takes bytes of a model, reads and stores them: three copies of its weights."""
    sizes: list[int] = []
    load = trial._session

    def counted(model: Any, folder: str) -> Any:
        sizes.append(len(model.SerializeToString()))
        return load(model, folder)

    monkeypatch.setattr(trial, "_session", counted)
    model = small(Wide(), {0: "batch"})
    for graph in (model, with_constant_nodes(model)):
        sizes.clear()
        assert len(rewrite(graph).replaced) == 1
        assert len(sizes) <= 3  # the model; the attention alone, as exported and as new
        assert max(sizes) < 4 * Wide.WEIGHTS / 10


def test_report() -> None:
    report = rewrite(exported("NeMo"))
    assert str(report).splitlines() == [
        "softmax                      what was done",
        "/layers.0/self_attn/Softmax  replaced",
        "/layers.1/self_attn/Softmax  replaced",
        "2 of 2 replaced",
    ]
    assert report.replaced == report.rows
    assert report.left_alone == ()
    model = exported("NeMo")
    del model.graph.node[:]
    assert str(rewrite(model)) == "nothing to replace: the graph has no softmax whose weights multiply values"


@pytest.mark.parametrize(("name", "reason"), [
    ("ESPnet, legacy", "its table of positions has 32 rows, but 32 queries of 32 keys need 63"),
    ("w2v-BERT, relative_key", "its scores are made by Einsum"),
])  # fmt: skip
def test_other_formulas_are_left_alone(name: str, reason: str) -> None:
    model = exported(name)
    assert name in OTHERS
    report = rewrite(model)
    assert len(report.left_alone) == 2
    assert all(reason in str(row.reason) for row in report.rows), report
    assert model == exported(name)


def test_cache_aware_streaming() -> None:
    """The size of the cache is a number in the nodes, but not in the inputs' shapes."""
    original, model = streaming(), streaming()
    with pytest.raises(RuntimeError, match=r"give rewrite examples of its inputs"):
        rewrite(model)
    assert model == original
    report = rewrite(model, [streaming_inputs(2, 41), streaming_inputs(3, 57)])
    assert len(report.replaced) == 2, report
    before, after = session_of(original), session_of(model)
    for batch, frames in ((1, 41), (2, 49), (3, 65)):
        given = streaming_inputs(batch, frames)
        assert_close(after.run(None, given), before.run(None, given))


@pytest.mark.parametrize("first", ["rewritten", "quantized"])
def test_dynamic_int8(first: str, tmp_path: Path) -> None:
    """The difference from the float32 graph is that of quantizing alone."""
    from onnxruntime.quantization import quantize_dynamic

    model, file = exported("ESPnet"), str(tmp_path / "model.onnx")
    onnx.save(model, file)
    with quiet():
        quantize_dynamic(file, str(tmp_path / "plain.onnx"))
    plain = onnx.load(tmp_path / "plain.onnx")
    both = copy.deepcopy(plain if first == "quantized" else model)
    assert len(rewrite(both).replaced) == 2
    if first == "rewritten":
        onnx.save(both, file)
        with quiet():
            quantize_dynamic(file, str(tmp_path / "both.onnx"))
        both = onnx.load(tmp_path / "both.onnx")
    assert kinds(both)["MatMulInteger"] > kinds(both)["RelAttention"] == 2
    given = inputs_of(EXPORTS["ESPnet"], 3, 180)
    exact, quantized, ours = (run(x, given)[0] for x in (model, plain, both))
    alone = np.abs(quantized - exact).max()
    assert np.abs(ours - exact).max() < 1.1 * alone
    assert np.abs(ours - quantized).max() < max(MAX_DIFFERENCE, alone)


def test_initializers_in_other_files(tmp_path: Path) -> None:
    """Their values are not loaded, and the new graph refers to the same file."""
    original = exported("Parakeet")
    onnx.save(
        copy.deepcopy(original), tmp_path / "a.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    model = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    with pytest.raises(ValueError, match=r"folder must have the model's file of initializers weights, got '\.'"):
        rewrite(model)
    assert len(rewrite(model, folder=tmp_path).replaced) == 2
    assert not any(x.raw_data for x in model.graph.initializer)
    onnx.save(model, tmp_path / "b.onnx")
    given = inputs_of(EXPORTS["Parakeet"], 2, 200)
    assert_close(run(str(tmp_path / "b.onnx"), given), run(original, given))


def test_a_mask_with_a_hole_is_an_error_of_run() -> None:
    model, export = exported("w2v-BERT"), EXPORTS["w2v-BERT"]
    rewrite(model)
    session, given = session_of(model), inputs_of(export, 2, 60)
    session.run(None, given)
    given["lengths"][0, 20:30] = 0
    with pytest.raises(Exception, match=r"end must hold key indices in \[0, M \+ L\] = \[0, 60\], got -1"):
        session.run(None, given)
    given["lengths"][0, :20] = 0  # padding on the left is no hole
    assert_close(session.run(None, given), run(exported("w2v-BERT"), given))


def shift_of(model: Any) -> list[Any]:
    """Return the nodes of the first layer's shift: Pad, and the Slices that drop a row and
    columns."""
    nodes = list(model.graph.node)
    first = next(n for n, node in enumerate(nodes) if node.op_type == "Pad" and "self_attn" in node.name)
    pad = nodes[first]
    slices = [x for x in nodes[first:] if x.op_type == "Slice" and "self_attn" in x.name][:2]
    return [pad, *slices]


def insert(
    model: Any, kind: str, before: str, *inputs: str, constants: dict[str, Any] | None = None, **attributes: Any
) -> None:
    """Insert a node between a tensor and its readers; "" stands for the tensor in its inputs."""
    for name, value in (constants or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    place = next(n for n, node in enumerate(model.graph.node) if before in node.output)
    for node in model.graph.node:
        for n, name in enumerate(node.input):
            if name == before:
                node.input[n] = f"{before}/changed"
    node = onnx.helper.make_node(kind, [x or before for x in inputs], [f"{before}/changed"], **attributes)
    model.graph.node.insert(place + 1, node)


def set_input(model: Any, node: Any, place: int, value: Any) -> None:
    name = f"{node.output[0]}/{place}"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), name))
    node.input[place] = name


def keep_first_row(model: Any) -> None:
    _, rows, _ = shift_of(model)
    set_input(model, rows, 1, [0])
    set_input(model, rows, 2, [-1])


def pad_right(model: Any) -> None:
    pad, *_ = shift_of(model)
    set_input(model, pad, 1, [0, 0, 0, 0, 0, 0, 0, 1])


def last_columns(model: Any) -> None:
    """Keep columns from the end: those of other distances."""
    columns = shift_of(model)[2]
    length, end = columns.input[2], f"{columns.input[2]}/end"
    place = list(model.graph.node).index(columns)
    model.graph.node.insert(place, onnx.helper.make_node("Neg", [length], [end]))
    columns.input[1] = end
    set_input(model, columns, 2, [2**62])


def scale_heads(model: Any) -> None:
    insert(model, "Mul", shift_of(model)[2].output[0], "", "heads", constants={"heads": np.float32([[[[1]], [[1.1]]]])})


def add_to_scores(model: Any) -> None:
    insert(model, "Add", shift_of(model)[2].output[0], "", "ten", constants={"ten": np.float32([[[[1]], [[2]]]])})


def clip_scores(model: Any) -> None:
    insert(model, "Tanh", shift_of(model)[2].output[0], "")


def other_softmax(model: Any) -> None:
    softmax = next(x for x in model.graph.node if x.op_type == "Softmax")
    softmax.attribute[0].i = 2


def weights_as_output(model: Any) -> None:
    softmax = next(x for x in model.graph.node if x.op_type == "Softmax")
    model.graph.output.append(onnx.ValueInfoProto(name=softmax.output[0]))


def hide_one_key(model: Any) -> None:
    """Hide key 3 of all queries, between others."""
    where = next(x for x in model.graph.node if x.op_type == "Where" and "self_attn" in x.name)
    mask = where.input[0]
    add = model.graph.node.insert
    place = list(model.graph.node).index(where)
    for name, value in (("three", [3]), ("last", [3]), ("values", [0, 1])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), f"hole/{name}"))
    nodes = [
        onnx.helper.make_node("Shape", [mask], ["hole/shape"]),
        onnx.helper.make_node("Gather", ["hole/shape", "hole/last"], ["hole/keys"]),
        onnx.helper.make_node("OneHot", ["hole/three", "hole/keys", "hole/values"], ["hole/one"]),
        onnx.helper.make_node("Cast", ["hole/one"], ["hole/key"], to=onnx.TensorProto.BOOL),
        onnx.helper.make_node("Or", [mask, "hole/key"], ["hole/mask"]),
    ]
    for node in reversed(nodes):
        add(place, node)
    where.input[0] = "hole/mask"


LOOK_ALIKES = {
    keep_first_row: "it does not move each score of positions to the column of its distance",
    pad_right: "it does not move each score of positions to the column of its distance",
    last_columns: "it does not move each score of positions to the column of its distance",
    scale_heads: "its scores have a Mul, .*, by what is not a constant number",
    add_to_scores: "its scores add ten, an input of the graph or a constant",
    clip_scores: "its scores are made by Tanh, .*, which the operator does not have",
    other_softmax: "its softmax is along axis 2, not the last of four",
    weights_as_output: "its scores or weights are used elsewhere, by an output of the graph",
    hide_one_key: "the operator refuses its inputs: .*end must hold key indices .*, got -1",
}


@pytest.mark.parametrize("change", LOOK_ALIKES, ids=lambda change: change.__name__)
def test_look_alikes_are_left_alone(change: Any) -> None:
    """The first layer computes something else, and stays; the second is replaced."""
    model = exported("Parakeet, eager")
    change(model)
    before = copy.deepcopy(model)
    report = rewrite(model)
    first, second = report.rows
    assert re.search(LOOK_ALIKES[change], str(first.reason), re.DOTALL), report
    assert second.reason is None
    assert kinds(model)["RelAttention"] == 1
    given = inputs_of(EXPORTS["Parakeet, eager"], 2, 150)
    wanted = run(before, given)
    assert_close(run(model, given), wanted)
    if change not in (weights_as_output, add_to_scores):  # softmax does not see what is added to all keys
        assert np.abs(wanted[0] - run(exported("Parakeet, eager"), given)[0]).max() > 10 * MAX_DIFFERENCE


def test_a_number_of_its_own_for_scores_of_positions() -> None:
    model = exported("Parakeet, eager")
    insert(model, "Mul", shift_of(model)[2].output[0], "", "number", constants={"number": np.float32(1.7)})
    before = copy.deepcopy(model)
    assert len(rewrite(model).replaced) == 2
    given = inputs_of(EXPORTS["Parakeet, eager"], 2, 150)
    assert_close(run(model, given), run(before, given))


def test_wrong_arguments_are_refused() -> None:
    model = exported("ESPnet")
    for wrong, kind, message in (
        ({"model": "model.onnx"}, TypeError, r"model must be an onnx.ModelProto \(of onnx.load\), got str"),
        ({"folder": 3}, TypeError, "folder must be a path, got 3"),
        ({"inputs": []}, TypeError, r"inputs must be None, or .* a dictionary of arrays for each run, got \[\]"),
        ({"inputs": [{"other": np.zeros(3)}]}, RuntimeError, "the model could not be run on inputs: .*features"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            rewrite(**{"model": model} | wrong)
    model.opset_import[0].version = 12
    with pytest.raises(ValueError, match="model must have opset 13 or newer, got 12"):
        rewrite(model)


@pytest.mark.parametrize(("batch", "frames", "reason"), [
    (1, (90, 120), "all runs have one batch row, but the model takes any number: give rewrite inputs with two"),
    (2, (90,), "all runs have 21 queries, but the model takes any number: give rewrite inputs of two lengths"),
])  # fmt: skip
def test_inputs_that_show_too_little(batch: int, frames: tuple[int, ...], reason: str) -> None:
    model = exported("ESPnet")
    report = rewrite(model, [inputs_of(EXPORTS["ESPnet"], batch, x) for x in frames])
    assert [row.reason for row in report.rows] == [reason, reason]
    assert model == exported("ESPnet")


def test_a_model_that_is_rewritten_twice() -> None:
    model = exported("ESPnet")
    rewrite(model)
    once = copy.deepcopy(model)
    assert not rewrite(model).rows
    assert model == once


WIDTH, AXES = 16, {0: "batch", 1: "frames"}
LOWEST = float(np.finfo(np.float32).min)


class Small(nn.Module):
    """An attention with two heads that reads a mask [B, L] or other integers.

    scores: makes the scores of the sum of both products and the mask. after: reads the weights and
    the hidden keys. shift: changes the shifted scores of positions. distances: [B or 1, 2 L - 1].
    changed: changes the queries of the product with the keys, [B, H, L, D].
    """

    def __init__(
        self, scores: Any = None, after: Any = None, shift: Any = None, distances: Any = None, changed: Any = None
    ) -> None:
        super().__init__()
        self.changed = changed
        torch.manual_seed(0)
        self.query, self.query_position, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scores, self.after, self.shift, self.distances = scores, after, shift, distances

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.size(1)
        query, query_position, key, value = (
            layer(x).view(x.size(0), -1, 2, WIDTH // 2).transpose(1, 2)
            for layer in (self.query, self.query_position, self.key, self.value)
        )
        query = query if self.changed is None else self.changed(query)
        distances = torch.arange(length - 1, -length, -1.0)[None]
        distances = distances if self.distances is None else self.distances(distances, mask)
        rows = torch.sin(distances[..., None] * torch.arange(0.1, 1.7, 0.1))
        rows = rows.view(rows.size(0), -1, 2, WIDTH // 2).transpose(1, 2)
        position = query_position @ rows.transpose(-1, -2)
        total = position.size(3)
        moved = nn.functional.pad(position, (1, 0)).view(x.size(0), 2, -1, length)[:, :, 1:]
        moved = moved.reshape(x.size(0), 2, length, total)
        moved = moved[..., :length] if self.shift is None else self.shift(moved, length, mask)
        hidden = (mask == 0)[:, None, None]
        added = (query @ key.transpose(-1, -2) + moved) / 3
        weights = torch.softmax(added if self.scores is None else self.scores(added, hidden), -1)
        weights = weights if self.after is None else self.after(weights, hidden)
        return (weights @ value).transpose(1, 2).reshape(x.size(0), length, WIDTH)


class Wide(Small):
    """Small, with a layer of many weights before the attention."""

    WEIGHTS = WIDTH * 4000

    def __init__(self) -> None:
        super().__init__()
        self.before, self.back = nn.Linear(WIDTH, 4000, bias=False), nn.Linear(4000, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.back(self.before(x)), mask)


def with_constant_nodes(model: Any) -> Any:
    """Return a copy of a model whose initializers are Constant nodes."""
    model = copy.deepcopy(model)
    for x in reversed(model.graph.initializer):
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [x.name], value=x))
    del model.graph.initializer[:]
    return model


def small(model: nn.Module, axes: dict[int, str] = AXES) -> Any:
    """Return a model that is exported with a mask, or with integers for each batch row."""
    mask = torch.ones((2, 30) if 1 in axes else 2, dtype=torch.int64)
    return onnx.load_from_string(
        to_onnx(model, {"x": torch.randn(2, 30, WIDTH), "mask": mask}, {"x": AXES, "mask": axes})
    )


def small_inputs(frames: int, *masks: Any) -> dict[str, Any]:
    x = np.random.default_rng(frames).standard_normal((len(masks), frames, WIDTH), dtype=np.float32)
    return {"x": x, "mask": np.array(masks, np.int64)}


def filled(*fills: float) -> Any:
    """Masks of padding and of later keys, each a number in place of the scores."""

    def scores(x: Tensor, hidden: Tensor) -> Tensor:
        later = torch.ones(hidden.size(-1), hidden.size(-1), dtype=torch.bool).triu(1)
        for fill, mask in zip(fills, (hidden, later), strict=False):
            x = x.masked_fill(mask, fill)
        return x

    return scores


def added(fill: float) -> Any:
    return lambda x, hidden: x + torch.where(hidden, fill, 0.0)


def not_a_number_is_0(weights: Tensor, hidden: Tensor) -> Tensor:
    return torch.where(torch.isnan(weights), 0.0, weights)


@pytest.mark.parametrize(("model", "is_replaced"), [
    (Small(filled(-1e4)), True),
    (Small(filled(-1e4, -1e4)), True),
    (Small(filled(-math.inf), lambda weights, hidden: weights.masked_fill(hidden, 0.0)), True),
    (Small(filled(-math.inf), not_a_number_is_0), True),
    (Small(added(LOWEST), not_a_number_is_0), True),
    (Small(added(-1e4)), False),
    (Small(filled(-1e9, -1e4)), False),
    (Small(filled(LOWEST), lambda weights, hidden: weights.masked_fill(hidden & (weights < 1), 0.0)), False),
])  # fmt: skip
def test_a_batch_row_without_keys(model: nn.Module, is_replaced: bool) -> None:
    """The random inputs have none; the mask of the comparison does."""
    original, graph = small(model), small(model)
    assert bool(rewrite(graph).replaced) == is_replaced
    left = np.arange(12) > 4
    given = small_inputs(12, np.ones(12), np.zeros(12), left)
    assert_close(run(graph, given), run(original, given))
    assert not is_replaced or kinds(graph)["RelAttention"] == 1


@pytest.mark.parametrize(("model", "reason"), [
    (Small(shift=lambda moved, length, mask: moved[..., mask[0] : mask[0] + length]), "its shift depends on .*values"),
    (Small(distances=lambda x, mask: x + mask[:, None]), "its table of positions may differ between batch rows"),
    (Small(scores=lambda x, hidden: x * 0.0, distances=lambda x, mask: x + mask.sum()), "the operator has no factor of 0"),
])  # fmt: skip
def test_what_the_runs_do_not_show(model: nn.Module, reason: str) -> None:
    graph = small(model, {0: "batch"})
    report = rewrite(graph, [small_inputs(12, 0, 0), small_inputs(19, 0, 0, 0)])
    assert re.search(reason, str(report.rows[0].reason)), report


BIAS = torch.linspace(-1, 1, WIDTH).view(2, 1, WIDTH // 2)  # [H, 1, D]


@pytest.mark.parametrize(("changed", "has_bias"), [
    (lambda q: (q + BIAS) * 0.7, True),
    (lambda q: q * 0.7 + BIAS, True),
    (lambda q: BIAS[None] + q / -0.7, True),
    (lambda q: (q.transpose(1, 2) + BIAS[:, 0]).transpose(1, 2) * 0.7, True),
    (lambda q: ((q + BIAS) * 0.7 + BIAS) * 1.1, True),
    (lambda q: q + BIAS[0], False),
    (lambda q: q + BIAS[:, :, :1], False),
    (lambda q: (q.transpose(2, 3) + BIAS.transpose(1, 2)).transpose(2, 3), True),
    (lambda q: (q.transpose(1, 3) + BIAS.permute(1, 2, 0)[0, :, None]).transpose(1, 3), False),
    (lambda q: (0.7 - q) / BIAS.exp(), False),
])  # fmt: skip
def test_biases_and_factors_of_queries(changed: Any, has_bias: bool) -> None:
    """A bias [H, D] and a factor become settings of the operator; others stay in the graph."""
    model = small(Small(filled(LOWEST), changed=changed))
    before = copy.deepcopy(model)
    assert len(rewrite(model).replaced) == 1
    [node] = [x for x in model.graph.node if x.op_type == "RelAttention"]
    assert bool(node.input[4]) == has_bias
    given = small_inputs(12, np.ones(12), np.arange(12) < 7)
    assert_close(run(model, given), run(before, given))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Small(filled(LOWEST)), Small(filled(LOWEST), lambda weights, hidden: weights.abs())

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.second(x + self.first(x, mask), mask)


def test_a_second_call_has_other_names() -> None:
    """An attention that stayed in the first call is replaced in the second."""
    model = small(Both())
    assert [row.reason is None for row in rewrite(model).rows] == [True]
    for node in model.graph.node:
        if node.op_type == "Abs":
            node.op_type = "Identity"
    before = copy.deepcopy(model)
    assert len(rewrite(model).replaced) == 1
    given = small_inputs(12, np.ones(12), np.arange(12) < 7)
    assert_close(run(model, given), run(before, given))


def test_nodes_in_another_order_and_functions() -> None:
    """ONNX Runtime takes both."""
    model = small(Small(filled(LOWEST)))
    before = copy.deepcopy(model)
    for name in [node.output[0] for node in model.graph.node if node.op_type == "Shape"]:
        insert(model, "Same", name, "", domain="own")
    body, versions = [onnx.helper.make_node("Identity", ["x"], ["y"])], list(model.opset_import)
    model.functions.append(onnx.helper.make_function("own", "Same", ["x"], ["y"], body, versions))
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert len(rewrite(model).replaced) == 1
    given = small_inputs(12, np.ones(12), np.arange(12) < 7)
    assert_close(run(model, given), run(before, given))


def test_weights_that_an_inner_graph_reads() -> None:
    model = small(Small())
    weights = next(node.output[0] for node in model.graph.node if node.op_type == "Softmax")
    helper = onnx.helper
    read = helper.make_node("ReduceSum", [weights], ["sum"], keepdims=0)
    branch = helper.make_graph([read], "branch", [], [onnx.ValueInfoProto(name="sum")])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "condition"))
    model.graph.node.append(helper.make_node("If", ["condition"], ["read"], then_branch=branch, else_branch=branch))
    model.graph.output.append(onnx.ValueInfoProto(name="read"))
    assert rewrite(model).rows[0].reason == "its scores or weights are used elsewhere, by If"


def test_a_number_that_a_run_may_change() -> None:
    """An initializer that is an input, too, is no constant."""
    model = small(Small())
    division = next(node for node in model.graph.node if node.op_type == "Div")
    model.graph.input.append(onnx.helper.make_tensor_value_info("number", onnx.TensorProto.FLOAT, []))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(3), "number"))
    division.input[1] = "number"
    assert re.search("by what is not a constant number", str(rewrite(model).rows[0].reason))


def test_inputs_that_cannot_be_guessed() -> None:
    model = small(Small())
    model.graph.input.append(onnx.helper.make_tensor_value_info("number", onnx.TensorProto.INT64, []))
    with pytest.raises(RuntimeError, match=r"no values are known for the input number, int64 \[\]"):
        rewrite(model)
    with pytest.raises(TypeError, match=r"a dictionary of arrays for each run, got <generator"):
        rewrite(small(Small()), (x for x in [small_inputs(12, np.ones(12))]))


def test_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "onnx.md").read_text()
    code, *_ = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    [printed] = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "onnx.md", "exec"), {})
    assert printed in capsys.readouterr().out


def test_packages_are_imported_by_rewrite_alone() -> None:
    code = "import sys, txl_kernels.onnx; print({'onnx', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert onnxruntime.__version__
