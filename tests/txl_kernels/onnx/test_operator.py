"""The operator for ONNX Runtime: the results of `rel_attention`, the same bits with any number of
threads, and an error for each wrong input or attribute."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builds import ROOT
from cases import CASES, COMPOSED, PAIRS, TERMS, TILES, Case, as_call, detached, make_inputs

pytest.importorskip("onnx", reason="needs the extra `onnx`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
import onnxruntime
from onnx_models import INPUTS, arrays_of, attributes_of, can_express, model_of, session_of

from txl_kernels import onnx as operator
from txl_kernels import rel_attention

# Older runtimes cannot infer shapes where an input is left out (csrc/cpu/onnx/operator.cpp).
INFERS_SHAPES = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 24)
EXPRESSED = [case for case in [*CASES, *TERMS, *COMPOSED, *TILES, *PAIRS] if can_express(case)]
LARGE = Case("large", B=2, H=4, L=300, M=100, D=64, causal=False)


def expected(case: Case) -> np.ndarray[Any, Any]:
    inputs = {
        n: x.contiguous() if isinstance(x, torch.Tensor) else x for n, x in make_inputs(case, torch.float32).items()
    }
    out = rel_attention(**as_call(detached(inputs)), backend="native")
    assert isinstance(out, torch.Tensor)
    return out.numpy()


@pytest.mark.parametrize("case", EXPRESSED, ids=str)
def test_results_are_those_of_rel_attention(case: Case) -> None:
    arrays, attributes, want = arrays_of(case), attributes_of(case), expected(case)
    session = session_of(model_of(arrays, attributes))
    [out] = session.run(None, arrays)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, want)


def as_blhd(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of a case in layout BLHD."""
    axes = dict.fromkeys(("q", "k", "v", "k_mem", "v_mem", "q_pos"), (0, 2, 1, 3)) | {"r": (1, 0, 2)}
    return {name: np.ascontiguousarray(x.transpose(axes.get(name, range(x.ndim)))) for name, x in arrays.items()}


@pytest.mark.parametrize("case", EXPRESSED, ids=str)
def test_layout_blhd_gives_the_same_bits(case: Case) -> None:
    arrays, attributes = arrays_of(case), attributes_of(case)
    [want] = session_of(model_of(arrays, attributes)).run(None, arrays)
    moved = as_blhd(arrays)
    [out] = session_of(model_of(moved, attributes | {"layout": "BLHD"})).run(None, moved)
    np.testing.assert_array_equal(out, want.transpose(0, 2, 1, 3))


def test_layout_bhld_is_the_default() -> None:
    arrays, attributes = arrays_of(CASE), attributes_of(CASE)
    [want] = session_of(model_of(arrays, attributes)).run(None, arrays)
    np.testing.assert_array_equal(
        session_of(model_of(arrays, attributes | {"layout": "BHLD"})).run(None, arrays)[0], want
    )


@pytest.mark.parametrize(("name", "shape", "message"), [
    ("k", (2, 2, 6, 8), "k must be [B, L, Hkv, D] with B = 2, L = 6, D = 8, got [2, 2, 6, 8]"),
    ("v", (2, 6, 1, 8), "v must be [B, L, Hkv, Dv] with B = 2, L = 6, Hkv = 2, got [2, 6, 1, 8]"),
    ("r", (4, 11, 3), "r must be [T, H, Dp] or [T, 1, Dp] with H = 4, got [4, 11, 3]"),
    ("q_pos", (2, 4, 6, 3), "q_pos must be [B, L, H, Dp] with B = 2, L = 6, H = 4, Dp = 3, got [2, 4, 6, 3]"),
])  # fmt: skip
def test_wrong_inputs_in_layout_blhd_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    given = as_blhd(arrays_of(CASE)) | {name: np.zeros(shape, np.float32)}
    session = session_of(model_of(given, attributes_of(CASE) | {"layout": "BLHD"}))
    with pytest.raises(Exception, match=r"InvalidArgument|INVALID_ARGUMENT") as raised:
        session.run(None, given)
    assert message_of(raised.value) == message


def test_cases_use_every_input_and_attribute() -> None:
    assert {name for case in EXPRESSED for name in arrays_of(case)} == set(INPUTS)
    settings = [attributes_of(case) for case in EXPRESSED]
    assert {x["outside"] for x in settings} == {"refuse", "clamp", "zero"}
    assert {name for x in settings for name in x} == {
        "causal", "left", "right", "zero_row", "r_descending", "outside", "scale", "position_scale", "softcap",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["start", "end"])
def test_bounds_in_int64_and_for_all_queries(name: str) -> None:
    case = Case("bounded", intervals="random", L=7)
    arrays, attributes = arrays_of(case), attributes_of(case)
    del arrays["end" if name == "start" else "start"]
    for shape in ((2, 7), (2, 1), (1, 7), (1, 1)):
        given = arrays | {name: arrays[name][: shape[0], : shape[1]]}
        [want] = session_of(model_of(given, attributes)).run(None, given)
        inputs = {n: torch.from_numpy(np.broadcast_to(x, (2, 7)).copy()) for n, x in given.items() if n == name}
        other = make_inputs(case, torch.float32) | {"start": None, "end": None} | inputs
        np.testing.assert_array_equal(want, rel_attention(**as_call(detached(other)), backend="native").numpy())
        wide = given | {name: given[name].astype(np.int64)}
        np.testing.assert_array_equal(session_of(model_of(wide, attributes)).run(None, wide)[0], want)


@pytest.mark.parametrize(
    "case",
    [Case("causal", zero_row=0), Case("causal, descending", r_descending=True, zero_row=10),
     Case("bidirectional", causal=False), Case("bidirectional, descending", causal=False, r_descending=True, zero_row=10)],
    ids=str,
)  # fmt: skip
def test_defaults_of_attributes(case: Case) -> None:
    arrays, attributes = arrays_of(case), attributes_of(case)
    assert arrays["r"].shape[1] == case.S + (0 if case.causal else case.L - 1)
    wanted = expected(case)
    short = {name: attributes[name] for name in ("causal", "r_descending") if attributes[name] != (name == "causal")}
    np.testing.assert_array_equal(session_of(model_of(arrays, short)).run(None, arrays)[0], wanted)
    given = short | {"scale": 0.0, "position_scale": 0.0, "zero_row": -1}
    np.testing.assert_array_equal(session_of(model_of(arrays, given)).run(None, arrays)[0], wanted)


def test_one_session_serves_any_batch_and_length() -> None:
    case = Case("dynamic", causal=False, Dv=5)
    shapes: dict[str, list[str | int]] = {
        "q": ["batch", 2, "length", 8], "k": ["batch", 2, "length", 8], "v": ["batch", 2, "length", 5],
        "r": [2, "rows", 8], "content_bias": [2, 8], "position_bias": [2, 8],
        "k_mem": ["batch", 2, "memory", 8], "v_mem": ["batch", 2, "memory", 5],
    }  # fmt: skip
    session = session_of(model_of(arrays_of(case), {"causal": 0}, shapes))
    assert session.get_outputs()[0].shape == (["batch", 2, "length", 5] if INFERS_SHAPES else [])
    for sizes in ({"B": 1, "L": 3, "M": 0}, {"B": 3, "L": 40, "M": 7}, {"B": 2, "L": 1, "M": 200}, {"B": 0, "L": 4}):
        other = case.but(**sizes)
        np.testing.assert_array_equal(session.run(None, arrays_of(other))[0], expected(other))


def test_output_shape_is_inferred_from_numbers_and_names_alone() -> None:
    case = Case("shapes", M=0)
    arrays = {name: x for name, x in arrays_of(case).items() if x.size}
    for q, v, wanted in (
        ([2, 2, 6, 8], [2, 2, 6, 3], [2, 2, 6, 3]),
        (["b", "h", "l", "d"], ["b", "h", "l", "w"], ["b", "h", "l", "w"]),
        (["b", None, "l", "d"], ["b", "h", "l", "w"], []),
        (["b", "l", "d"], ["b", "h", "l", "w"], []),
    ):
        session = session_of(model_of(arrays, {}, {"q": q, "v": v}))
        assert session.get_outputs()[0].shape == (wanted if INFERS_SHAPES else [])


def test_two_sessions_in_two_threads_with_one_and_two_threads() -> None:
    """Each gets the same bits in every run."""
    arrays, attributes = arrays_of(LARGE), attributes_of(LARGE)
    sessions = [session_of(model_of(arrays, attributes), threads) for threads in (1, 2)]
    want = expected(LARGE)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(session.run, None, arrays) for _ in range(10) for session in sessions]
        for run in runs:
            np.testing.assert_array_equal(run.result()[0], want)


THREADS = """
import sys, time
from pathlib import Path
import numpy as np, onnxruntime

library, model, inputs, threads = sys.argv[1], *map(Path, sys.argv[2:4]), int(sys.argv[4])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model.read_bytes(), options, providers=["CPUExecutionProvider"])
arrays = dict(np.load(inputs))

def ticks():  # of processor time, by thread
    return {x.name: int((x / "stat").read_text().rsplit(")", 1)[1].split()[11]) for x in Path("/proc/self/task").iterdir()}

first = ticks()
for _ in range(400):
    session.run(None, arrays)
    last = ticks()
    if sum(now - first.get(name, 0) > 5 for name, now in last.items()) == threads:
        break
started = last.keys() - first.keys()
print(len(started), sum(last[name] - first[name] > 5 for name in first))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", [1, 2])
def test_work_is_done_by_threads_of_the_session(threads: int, tmp_path: Path) -> None:
    """All of them work, and the library starts none."""
    arrays = arrays_of(LARGE)
    (tmp_path / "model.onnx").write_bytes(model_of(arrays, attributes_of(LARGE)))
    np.savez(tmp_path / "inputs.npz", **arrays)
    command = [sys.executable, "-c", THREADS, operator.library(), "model.onnx", "inputs.npz", str(threads)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", str(threads)]


CASE = Case("every input", B=2, H=4, Hkv=2, L=6, M=5, D=8, Dp=3, r_bias="H T", sink="B H L", intervals="random")
f32 = np.float32
# Other inputs, None for one that is left out; the message.
WRONG_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"q": np.zeros((2, 4, 6), f32)}, "q must be [B, H, L, D], got [2, 4, 6]"),
    ({"k": np.zeros((2, 2, 7, 8), f32)}, "k must be [B, Hkv, L, D] with B = 2, L = 6, D = 8, got [2, 2, 7, 8]"),
    ({"v": np.zeros((2, 1, 6, 8), f32)}, "v must be [B, Hkv, L, Dv] with B = 2, Hkv = 2, L = 6, got [2, 1, 6, 8]"),
    ({"r": np.zeros((3, 11, 3), f32)}, "r must be [H, T, Dp] or [1, T, Dp] with H = 4, got [3, 11, 3]"),
    ({"r": np.zeros((2, 4, 11, 3), f32)}, "r must be [H, T, Dp] or [1, T, Dp] with H = 4, got [2, 4, 11, 3]"),
    ({"q_pos": None}, "r must be [H, T, Dp] or [1, T, Dp] with H = 4, Dp = 8, got [4, 11, 3]"),
    ({"content_bias": np.zeros((4, 7), f32)}, "content_bias must be [H, D] with H = 4, D = 8, got [4, 7]"),
    ({"position_bias": np.zeros((4, 8), f32)}, "position_bias must be [H, Dp] with H = 4, Dp = 3, got [4, 8]"),
    ({"k_mem": np.zeros((1, 2, 5, 8), f32)}, "k_mem must be [B, Hkv, M, D] with B = 2, Hkv = 2, D = 8, got [1, 2, 5, 8]"),
    ({"v_mem": np.zeros((2, 2, 4, 8), f32)},
     "v_mem must be [B, Hkv, M, Dv] with B = 2, Hkv = 2, M = 5, Dv = 8, got [2, 2, 4, 8]"),
    ({"v_mem": None}, "v_mem must be given beside k_mem"),
    ({"k_mem": None}, "k_mem must be given beside v_mem"),
    ({"start": np.zeros((3, 6), np.int32)}, "start must be [B or 1, L or 1] with B = 2, L = 6, got [3, 6]"),
    ({"end": np.zeros(6, np.int32)}, "end must be [B or 1, L or 1] with B = 2, L = 6, got [6]"),
    ({"end": np.zeros((2, 6), f32)}, "end must be int32 or int64, got ONNX's element type 1"),
    ({"start": np.full((2, 6), -1, np.int32)}, "start must hold key indices in [0, M + L] = [0, 11], got -1"),
    ({"start": np.full((2, 1), 2**40)}, "start must hold key indices in [0, M + L] = [0, 11], got 1099511627776"),
    ({"end": np.full((1, 1), 12)}, "end must hold key indices in [0, M + L] = [0, 11], got 12"),
    ({"q_pos": np.zeros((2, 4, 6, 8), f32)},
     "q_pos must be [B, H, L, Dp] with B = 2, H = 4, L = 6, Dp = 3, got [2, 4, 6, 8]"),
    ({"r_bias": np.zeros((4, 9), f32)}, "r_bias must be [H, T] or [1, T] with H = 4, T = 11, got [4, 9]"),
    ({"sink": np.zeros(3, f32)}, "sink must be [H] or [B, H, L] with B = 2, H = 4, L = 6, got [3]"),
    ({"r": None}, "position_bias must not be given without r: it multiplies rows of r"),
    ({"r": None, "position_bias": None}, "q_pos must not be given without r: it multiplies rows of r"),
    ({"r": None, "position_bias": None, "q_pos": None, "r_bias": None}, "r must be given, or r_bias"),
    ({"q": np.zeros((2, 3, 6, 8), f32), "r": np.zeros((1, 11, 3), f32), "content_bias": None, "position_bias": None,
      "q_pos": np.zeros((2, 3, 6, 3), f32), "r_bias": None, "sink": None}, "Hkv must be H = 3 or a divisor of it, got 2"),
    ({"r": np.zeros((4, 3, 3), f32), "r_bias": None, "start": None, "end": None},
     "T must be enough for the distances 0 to 10 that queries see, whose rows are zero_row + distance, got T 3 and "
     "zero_row 0"),
]  # fmt: skip
WRONG_ATTRIBUTES: list[tuple[dict[str, Any], str]] = [
    ({"causal": 2}, "causal must be 0 or 1, got 2"),
    ({"causal": 1.0}, "causal must be an integer, got a float"),
    ({"left": -2}, "left must be at least 0, or -1 for all keys, got -2"),
    ({"right": "none"}, "right must be an integer, got a string"),
    ({"zero_row": [3]}, "zero_row must be an integer, got a list"),
    ({"zero_row": -2}, "zero_row must be a row of r, or -1 for the default, got -2"),
    ({"r_descending": -1}, "r_descending must be 0 or 1, got -1"),
    ({"scale": 1}, "scale must be a float, got an integer"),
    ({"softcap": [0.5, 0.5]}, "softcap must be a float, got a list"),
    ({"scale": float("nan")}, "scale must be finite as a float, got nan"),
    ({"position_scale": float("inf")}, "position_scale must be finite as a float, got inf"),
    ({"softcap": -1.0}, "softcap must be 0 for none, or from 1e-30 to 1e30, got -1"),
    ({"softcap": float("nan")}, "softcap must be 0 for none, or from 1e-30 to 1e30, got nan"),
    ({"outside": 1}, "outside must be a string, got an integer"),
    ({"outside": "wrap"}, 'outside must be "refuse", "clamp" or "zero", got "wrap"'),
    ({"layout": "LBHD"}, 'layout must be "BHLD" or "BLHD", got "LBHD"'),
    ({"layout": 1}, "layout must be a string, got an integer"),
]
WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"causal": 0, "right": -1, "zero_row": -1},
     "zero_row must be given where causal is 0 and r or r_bias has not M + 2 L - 1 = 16 rows, got 11 rows"),
    ({"r_descending": 1, "zero_row": 11}, "zero_row must be a row of r (0 to 10) where r_descending is 1, got 11"),
    ({"outside": "clamp", "zero_row": 11}, 'zero_row must be a row of r (0 to 10) where outside is "clamp", got 11'),
]  # fmt: skip


def message_of(error: BaseException) -> str:
    """Return the sentence of the operator, without what the runtime writes before it."""
    return re.sub(r"^.*?(?=\b\w+ must )", "", str(error), count=1, flags=re.DOTALL)


@pytest.mark.parametrize(("changes", "message"), WRONG_INPUTS, ids=[message for _, message in WRONG_INPUTS])
def test_wrong_inputs_are_refused(changes: dict[str, Any], message: str) -> None:
    """The session goes on to serve right ones."""
    right = arrays_of(CASE)
    given = {name: x for name, x in (right | changes).items() if x is not None}
    session = session_of(model_of(given, attributes_of(CASE)))
    with pytest.raises(Exception, match=r"InvalidArgument|INVALID_ARGUMENT") as raised:
        session.run(None, given)
    assert message_of(raised.value) == message
    if all(x is not None and x.dtype == right[name].dtype for name, x in changes.items()):
        np.testing.assert_array_equal(session.run(None, right)[0], expected(CASE))


@pytest.mark.parametrize(("changes", "message"), WRONG_SETTINGS, ids=[message for _, message in WRONG_SETTINGS])
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    arrays = arrays_of(CASE)
    session = session_of(model_of(arrays, attributes_of(CASE) | changes))
    with pytest.raises(Exception, match=r"InvalidArgument|INVALID_ARGUMENT") as raised:
        session.run(None, arrays)
    assert message_of(raised.value) == message


@pytest.mark.parametrize(("changes", "message"), WRONG_ATTRIBUTES, ids=[message for _, message in WRONG_ATTRIBUTES])
def test_wrong_attributes_are_refused_when_the_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=r" must ") as raised:
        session_of(model_of(arrays_of(CASE), attributes_of(CASE) | changes))
    assert message_of(raised.value) == message


def test_example_of_the_documentation() -> None:
    page = (ROOT / "docs" / "how-to" / "onnx.md").read_text()
    [*_, code] = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(code, "onnx.md", "exec"), {})
