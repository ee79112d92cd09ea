"""Graphs that are written by hand: `rewrite` replaces an attention only if what its runs do not
show cannot change it."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
import onnx
from onnx import numpy_helper, parser
from onnx_models import session_of

from txl_kernels.onnx import rewrite, trial
from txl_kernels.onnx.graph import Graph

# Pad, Reshape and Slice move the scores of positions p [B, 2, T, 2 T - 1] to m [B, 2, T, T].
SHIFT = """L2 = Add (L1, L1) p1 = Pad (p, pads) h1 = Concat <axis = 0> (x1, L1) p2 = Reshape (p1, h1)
  p3 = Slice (p2, i1, L2, i2) h2 = Concat <axis = 0> (x2, L1, n1) p4 = Reshape (p3, h2) """
END = "m = Slice (p4, i0, L1, i3)"
# The same by their indices in [T (2 T - 1)], from distances dd.
GATHER = """j = Range (z, L, one) jr = Reshape (j, r1) jc = Reshape (j, c2) dd = Sub (jc, jr) {}
  rows = Add (L, last) io = Mul (jc, rows) ix = Add (io, col) ixf = Reshape (ix, n1) h3 = Concat <axis = 0> (x2, n1)
  pf = Reshape (p, h3) g1 = Gather <axis = 2> (pf, ixf) h4 = Concat <axis = 0> (x2, L1, L1) m = Reshape (g1, h4)"""
BRANCHES = (
    "then_branch = t () => (int64[1] t1) {t1 = Identity (l9)}, else_branch = e () => (int64[1] e1) {e1 = Identity (i1)}"
)


def graph(
    shift: str = SHIFT + END, scores: str = "s = Mul (c, scale)", after: str = "a = Softmax (s)", **constants: Any
) -> Any:
    """Return a model of an attention.

    shift: makes m of p. scores: makes s of the sum c. after: makes the weights a of s. constants:
    further ones that these read.
    """
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
g (float[B,2,T,8] q, float[B,2,T,8] k, float[B,2,T,8] v, bool[B,T] hidden) => (float[B,2,T,8] o)
<int64[1] i0 = {{0}}, int64[1] i1 = {{1}}, int64[1] i2 = {{2}}, int64[1] i3 = {{3}}, int64 m1 = {{-1}}, int64 z = {{0}},
 int64 one = {{1}}, int64[3] x1 = {{0, 0, -1}}, int64[2] x2 = {{0, 0}}, int64[1] n1 = {{-1}}, int64[2] r1 = {{1, -1}},
 int64[2] c2 = {{-1, 1}}, int64[4] c1 = {{1, 1, -1, 1}}, int64[2] ax = {{1, 2}}, float scale = {{0.35}},
 int64[8] pads = {{0, 0, 0, 1, 0, 0, 0, 0}}, float[8] f = {{0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}}>
{{ sq = Shape (q) L1 = Slice (sq, i2, i3) L = Squeeze (L1) last = Add (L, m1) neg = Neg (L) d = Range (last, neg, m1)
  df = Cast <to = 1> (d) dr = Reshape (df, c1) w = Mul (dr, f) e2 = Concat <axis = 0> (i1, i2, i1, i1)
  w2 = Expand (w, e2) r = Sin (w2) rt = Transpose <perm = [0, 1, 3, 2]> (r) kt = Transpose <perm = [0, 1, 3, 2]> (k)
  ac = MatMul (q, kt) p = MatMul (q, rt) {shift} c = Add (ac, m) hu = Unsqueeze (hidden, ax) {scores} {after}
  o = MatMul (a, v) }}""")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items())
    return model


def feed(batch: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    given = {name: rng.standard_normal((batch, 2, length, 8), dtype=np.float32) for name in "qkv"}
    return given | {"hidden": np.arange(length) >= length - 3 * np.arange(batch)[:, None]}


def clipped(limit: int) -> Any:
    return graph(
        GATHER.format("dc = Clip (dd, low, high) col = Sub (last, dc)"), low=np.int64(-limit), high=np.int64(limit)
    )


def masked(fill: float, scores: str = "t = Mul (c, scale) s = Where (hu, fill, t)", **constants: Any) -> Any:
    return graph(scores=scores, fill=np.float32(fill), **constants)


def dropped(mode: str, **constants: Any) -> Any:
    """Return a model whose weights have a Dropout. mode: makes its training_mode, on."""
    after = f"b = Softmax (s) {mode} a = Dropout <seed = 5> (b, ratio, on)"
    return graph(after=after, ratio=np.float32(0.9), **constants)


def from_start(start: str, **constants: Any) -> Any:
    """Return a model whose shift keeps columns from a start, which is 0 in the runs."""
    return graph(SHIFT + f"{start} to = Add (from, L1) m = Slice (p4, from, to, i3)", **constants)


def distances_from_a_table() -> Any:
    table = np.clip(np.arange(500)[:, None] - np.arange(500), -350, 350)
    rows = "t1 = Slice (table, i0, L1, i0) t2 = Slice (t1, i0, L1, i1) col = Sub (last, t2)"
    return graph(GATHER.format(rows), table=table)


def start_that_a_run_may_change() -> Any:
    model = from_start("from = Identity (set)", set=np.array([0]))
    model.graph.input.append(onnx.helper.make_tensor_value_info("set", onnx.TensorProto.INT64, [1]))
    return model


SCALED_LAST = "t = Where (hu, fill, c) s = Mul (t, scale)"
SIX = {"six": np.float32(6)}
LEFT_ALONE = {
    "distances clipped beyond the runs": (clipped(350), "at a length of 352, beyond the constant 350 of Clip, dc"),
    "a start that changes beyond the runs": (
        from_start("le = Less (L1, far) from = Where (le, i0, i1)", far=np.array([300])),
        "of its distance, at a length of 302, beyond the constant 300 of Less, le",
    ),
    "a start that is 0 up to a quotient": (from_start("from = Div (L1, far)", far=np.array([300])), "at a length of 302"),
    "a constant that others make": (
        from_start("much = Add (far, i1) le = Less (L1, much) from = Where (le, i0, i1)", far=np.array([300])),
        "at a length of 303, beyond the constant 301 of Less, le",
    ),
    "distances clipped beyond what is run": (clipped(9000), "at a length of 9002, .*: give rewrite inputs as long"),
    "the size of a tensor that is cut": (
        from_start("mi = Min (L1, far) cut = Slice (q, i0, mi, i2) sc = Shape (cut) lc = Slice (sc, i2, i3) "
                   "from = Sub (L1, lc)", far=np.array([300])),
        "its shift cannot be checked at a length of 302, beyond the constant 300 of Min, mi",
    ),
    "distances from a table": (distances_from_a_table(), "its shift reads table, a constant of which the runs show a part"),
    "a size of NonZero": (
        from_start("gt = Greater (q, six) nz = NonZero (gt) ns = Shape (nz) from = Slice (ns, i1, i2)", **SIX),
        "its shift depends on from, which depends on values of the inputs",
    ),
    "a size of NonZero of its own scores": (
        from_start("gt = Greater (p, far) nz = NonZero (gt) ns = Shape (nz) from = Slice (ns, i1, i2)", far=np.float32(99)),
        "its shift depends on from, which depends on values of the inputs",
    ),
    "a size of Compress": (
        from_start("qf = Reshape (k, n1) gt = Greater (qf, six) nz = Compress (qf, gt) from = Shape (nz)", **SIX),
        "its shift depends on from, which depends on values of the inputs",
    ),
    "a start that a run may change": (start_that_a_run_may_change(), "its shift depends on from, which depends on values"),
    "a size of If": (
        graph(SHIFT + f"s9 = Shape (p4) l9 = Slice (s9, i2, i3) cn = Greater (l9, i1) en = If (cn) <{BRANCHES}> "
              "m = Slice (p4, i0, en, i3)"),
        "its shift depends on If, en, whose inner graphs are not read",
    ),
    "a Dropout that values switch on": (
        dropped("mx = ReduceMax <keepdims = 0> (q) on = Greater (mx, six)", **SIX),
        "its weights have a Dropout, a, whose training_mode is not constant false",
    ),
    "a number of hidden scores whose size values decide": (
        masked(-1e4, "gt = Greater (q, six) nz = NonZero (gt) ns = Shape (nz) n = Slice (ns, i0, i1) n2 = Sub (n, i3) "
               "many = Expand (fill, n2) t = Mul (c, scale) s = Where (hu, many, t)", **SIX),
        "its output depends on n2, which depends on values of the inputs",
    ),
    "a Dropout that is on": (dropped("", on=np.array(True)), "a Dropout, a, whose training_mode is not constant false"),
    "hidden scores of -1e3": (masked(-1e3), "does not hide keys: it has no constant that sets a score to -10000 or less"),
    "hidden scores of -1e4 before the scale": (masked(-1e4, SCALED_LAST), "does not hide keys"),
    "a mask of -1e3 that is added": (
        graph(scores="t = Mul (c, scale) add = Where (hu, fill, zero) s = Add (t, add)", fill=np.float32(-1e3),
              zero=np.float32(0)),
        "does not hide keys",
    ),
}  # fmt: skip
REPLACED = {
    "as it is": graph(),
    "distances by their indices": graph(GATHER.format("col = Sub (last, dd)")),
    "a start that stays the same beyond the runs": from_start(
        "le = Less (L1, far) from = Where (le, i0, same)", far=np.array([300]), same=np.array([0])
    ),
    "the size of its own scores": from_start("s9 = Shape (p4) l9 = Slice (s9, i2, i3) from = Sub (L1, l9)"),
    "a Dropout that is off": dropped("", on=np.array(False)),
    "hidden scores of -1e4": masked(-1e4),
    "hidden scores of -1e4 after the scale": masked(-1e4 / 0.35, SCALED_LAST),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_the_runs_do_not_show_is_left_alone(name: str) -> None:
    model, reason = LEFT_ALONE[name]
    before = copy.deepcopy(model)
    [row] = rewrite(model).rows
    assert re.search(reason, str(row.reason)), row
    assert model == before


@pytest.mark.parametrize("name", REPLACED)
def test_what_cannot_change_is_replaced(name: str) -> None:
    original = REPLACED[name]
    model = copy.deepcopy(original)
    report = rewrite(model)
    assert len(report.replaced) == 1, report
    for batch, length in ((2, 12), (1, 320)):
        given = feed(batch, length)
        wanted, got = (session_of(x).run(None, given)[0] for x in (original, model))
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_longer_inputs_take_the_place_of_the_check_beyond_a_constant() -> None:
    model = clipped(350)
    [row] = rewrite(model, [feed(2, 20), feed(1, 360)]).rows
    assert re.search(r"column of its distance$", str(row.reason)), row


def test_a_model_is_run_on_longer_inputs_only_if_strides_shorten_them() -> None:
    """An input after the attention that does not fit ends the runs, at their first lengths."""
    model, lengths = graph(), []
    model.graph.node[-1].output[0] = "o0"
    model.graph.node.append(onnx.helper.make_node("Slice", ["o0", "i1", "L1", "i2"], ["o1"]))
    model.graph.node.append(onnx.helper.make_node("Add", ["o1", "shorter"], ["o"]))
    model.graph.input.append(onnx.helper.make_tensor_value_info("shorter", onnx.TensorProto.FLOAT, ["B", 2, "S", 8]))
    random_inputs = trial.random_inputs

    def recorded(graph: Graph, batch: int, frames: int) -> Any:
        lengths.append(frames)
        return random_inputs(graph, batch, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "random_inputs", recorded)
        with pytest.raises(RuntimeError, match=r"could not be run on random inputs; give rewrite examples"):
            rewrite(model)
    assert max(lengths) == 203


def test_inputs_are_longer_where_strides_shorten_them() -> None:
    """A window of 150 frames, each 64: there are 131 by default."""
    model = graph()
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    del model.graph.input[:]
    model.graph.input.append(value("x", onnx.TensorProto.FLOAT, ["B", 16, "frames"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 2, 8, -1]), "heads"))
    nodes = [
        make("MaxPool", ["x"], ["y1"], kernel_shape=[150], strides=[64]),
        make("Reshape", ["y1", "heads"], ["y2"]),
        *(make("Transpose", ["y2"], [name], perm=[0, 1, 3, 2]) for name in "qkv"),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    for node in model.graph.node:
        if "hidden" in node.input:
            model.graph.node.remove(node)
    report = rewrite(model)
    assert len(report.replaced) == 1, report


def test_initializers_of_another_folder(tmp_path: Path) -> None:
    """Their values are not loaded; ONNX Runtime before 1.21 cannot be told where they are."""
    model = graph()
    [table] = (x for x in model.graph.initializer if x.name == "f")
    table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table), "f"))  # others are no bytes, and stay
    onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    model = onnx.load(tmp_path / "a.onnx", load_external_data=False)
    assert any(x.external_data for x in model.graph.initializer)
    assert len(rewrite(model, folder=tmp_path).replaced) == 1
