"""Bad input: the error names the argument, what was given and what is accepted, before any kernel
runs."""

import contextlib
import inspect
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from cases import TENSORS, Case, as_call, make_inputs
from internals import WARN_ONCE

from txl_kernels import RelAttention, available_backends, checks, rel_attention, rel_attention_weights
from txl_kernels.backends import cpu

B, H, L, M, D = 2, 3, 4, 5, 8


@pytest.fixture
def call() -> dict[str, Any]:
    return as_call(make_inputs(Case(B=B, H=H, L=L, M=M, D=D), torch.float32))


def zeros(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*shape, **kwargs)


INT = torch.int32
# Messages, .. for what is left out, and the arguments that cause them.
TYPE_ERRORS: dict[str, dict[str, Any]] = {
    "q must be a torch.Tensor, got list": {"q": [1.0]},
    "q must have a floating-point dtype, got torch.int32": {"q": zeros(B, H, L, D, dtype=INT)},
    "k must be a dense (strided) tensor": {"k": zeros(B, H, L, D).to_sparse()},
    "k must have q's dtype torch.float32, got torch.float64": {"k": zeros(B, H, L, D, dtype=torch.float64)},
    "memory must be None or a pair (k_mem, v_mem)": {"memory": zeros(B, H, M, D)},
    "memory must be .. got tuple of length 3": {"memory": (1, 2, 3)},
    "v_mem must be a torch.Tensor, got NoneType": {"memory": (zeros(B, H, M, D), None)},
    "causal must be True or False, got NoneType": {"causal": None},
    "window must be None or an integer >= 1 .., got float": {"window": 2.0},
    "window[1] must be None or .., got float": {"window": (1, 0.5)},
    "r or r_bias must be given, got None for both": {"r": None, "position_bias": None},
    "q_pos must be None or a torch.Tensor, got float": {"q_pos": 1.0},
    "q_pos must have q's dtype": {"q_pos": zeros(B, H, L, D).double(), "position_bias": None},
    "position_scale must be .., got Tensor": {"position_scale": torch.ones(())},
    "outside must be one of refuse, clamp, zero, got bool": {"outside": True},
    "outside must be one of .., got ndarray": {"outside": np.array(["refuse", "zero"])},
    "return_lse must be True or False, got str": {"return_lse": "x"},
    "dropout_p must be a number in [0, 1), got str": {"dropout_p": "0.1", "prefix": 2},
    "sink must be None or a tensor [H] or [B, H, L], got float": {"sink": 0.5},
    "sink must be .. floating-point dtype, got torch.int32": {"sink": zeros(H, dtype=INT)},
    "scale must be None or a finite number .. got Tensor": {"scale": torch.tensor(1.0)},
    "dropout_seed must be None or an int64 tensor .., got int": {"dropout_p": 0.1, "dropout_seed": 3},
    "dropout_seed must be .. of one element on cpu, got torch.int64 [2]":
        {"dropout_p": 0.1, "dropout_seed": torch.tensor([1, 2])},
    "start must be None or an int32 tensor broadcastable to [B, L], got list": {"start": [0]},
    "start must be int32 (or int64), got torch.float32": {"start": zeros(L)},
    "start must be a dense (strided) tensor, got layout torch.sparse_coo":
        {"start": zeros(B, L, dtype=torch.int64).to_sparse()},
    "backend must be None or one of native, .., got list": {"backend": ["native"]},
    "chunk must be None or a pair (size, left), got 4": {"chunk": 4, "causal": False},
}  # fmt: skip
VALUE_ERRORS: dict[str, dict[str, Any]] = {
    "q must be [B, H, L, D], got shape [3, 4, 8]": {"q": zeros(H, L, D)},
    "q must have a head width D >= 1, got shape [2, 3, 4, 0]": {n: zeros(B, H, L, 0) for n in "qkv"} | {"memory": None},
    "k must be [B, Hkv, L, D] = [2, Hkv, 4, 8] with Hkv a divisor of q's 3 heads, got ..5, 8":
        {"k": zeros(B, H, L + 1, D)},
    "v_mem must be .., M, 9] of v's width, got": {"v": zeros(B, H, L, D + 1)},
    "v must be on q's device cpu, got meta": {"v": zeros(B, H, L, D, device="meta")},
    "k_mem and v_mem must have the same length M, got 5 and 4": {"memory": (zeros(B, H, M, D), zeros(B, H, M - 1, D))},
    "r must be [H, T, D] = [3, T, 8], got shape [9, 8]": {"r": zeros(9, D)},
    "r must have a row for each visible distance, 0 to 8, but .. its 8 rows .. 0 to 7: r needs 9 rows with zero_row=0":
        {"r": zeros(H, 8, D)},
    "r must have .. distance, -3 to 8, but ..: r needs 12 rows with zero_row=3": {"causal": False},
    "r must have .. distance, 0 to 4, but ..: r needs 5 rows":
        {"r": zeros(H, 4, D), "start": torch.tensor([[1, 3, 5, 5]], dtype=INT)},
    "content_bias must be [H, D] = [3, 8], got shape [8]": {"content_bias": zeros(D)},
    "window must be None or an integer >= 1 .., got 0": {"window": 0},
    "window must be an integer or a pair .., got 3 values": {"window": (1, 2, 3)},
    "window[0] must be None or an integer >= 0, got -1": {"window": (-1, 0)},
    "position_bias must be None where r is None": {"r": None, "r_bias": zeros(H, L + M)},
    "r_bias must be [H, T] = [3, T], got ..[3, 9, 1]": {"r_bias": zeros(H, 9, 1)},
    "r_bias must be .. = [3, 9] beside r, got": {"r_bias": zeros(H, 8)},
    "r_bias must have .. its 8 rows are of distances 0 to 7: r_bias needs 9 rows with zero_row=0":
        {"r": None, "position_bias": None, "r_bias": zeros(H, 8)},
    "k must have as many heads as q, 3, or a divisor of them, got 2 in shape [2, 2, 4, 8]":
        {"k": zeros(B, 2, L, D), "v": zeros(B, 2, L, D), "memory": None},
    "v must be [B, Hkv, L, Dv] = [2, 3, 4, Dv]": {"v": zeros(B, 1, L, D)},
    "q_pos must be [B, H, L, Dp] = [2, 3, 4, Dp], got": {"q_pos": zeros(H, L, D)},
    "r must be [H, T, Dp of q_pos] = [3, T, 5], got shape [3, 9, 8]":
        {"q_pos": zeros(B, H, L, 5), "position_bias": None},
    "position_bias must be [H, Dp] = [3, 5], got shape [3, 8]": {"q_pos": zeros(B, H, L, 5)},
    "q_pos must be None where r is None":
        {"r": None, "position_bias": None, "r_bias": zeros(H, L + M), "q_pos": zeros(B, H, L, D)},
    "outside must be one of refuse, clamp, zero, got 'skip'": {"outside": "skip"},
    "r must have a row where outside='zero', got none": {"outside": "zero", "r": zeros(H, 0, D)},
    "sink must be [H] = [3] or .. = [2, 3, 4], got shape [2]": {"sink": zeros(2)},
    "sink must be on q's device cpu, got meta": {"sink": zeros(H, device="meta")},
    "softcap must be 0.0 for none, or a number .., got -1.0": {"softcap": -1.0},
    "softcap must be .., got 1e-31": {"softcap": 1e-31},
    "zero_row must be an integer from 0 .., got -1": {"zero_row": -1},
    "zero_row must be an integer from 0 to 2**31 - 1": {"zero_row": 2**70},
    "scale must be None or a finite number in float32's range, got nan": {"scale": math.nan},
    "dropout_p must be a number in [0, 1), got 1.0": {"dropout_p": 1.0},
    "end must broadcast to [B, L] = [2, 4], got shape [2, 5]": {"end": zeros(B, L + 1, dtype=INT)},
    "end must be on q's device cpu, got meta": {"end": zeros(L, dtype=INT, device="meta")},
    "start must hold key indices in [0, M + L] = [0, 9], got values from -1": {"start": torch.tensor([-1], dtype=INT)},
    "end must hold key indices .. = [0, 9], got values from 10 to 10": {"end": torch.tensor([10], dtype=INT)},
    "backend must be None or one of native, .., got 'cuda9000'": {"backend": "cuda9000"},
    "chunk[0] must be .. >= 1 .., got 0": {"chunk": (0, 1), "causal": False},
    "chunk needs causal=False": {"chunk": (2, 1)},
    "prefix must be an integer from 0 to M + L = 9, got 12": {"prefix": 12},
    "zero_row must be a row of r (0 to 8) .. got 9": {"r_descending": True, "zero_row": 9},
    "r_bias must be [H, T] = [3, 9] or [1, 9], got ..[1, 3]": {"r_bias": zeros(1, 3)},
    "r must be [H, T, D] = ..got shape [4, 9, 8]": {"r": zeros(4, 9, D), "outside": "clamp"},
    "r must be .. got shape [3, 3, 9, 8]": {"r": zeros(3, H, 9, D)},
    "r must have a row where outside='clamp'": {"r": zeros(H, 0, D), "outside": "clamp"},
    "r must have .. 0 to 8, but .. distances -5 to 3: r needs 9 rows .. (zero_row=8 with r_descending=True)":
        {"r_descending": True, "zero_row": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [(error, *x) for error, bad in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS)) for x in bad.items()],
)
def test_error_names_the_argument(
    call: dict[str, Any], error: type[Exception], message: str, change: dict[str, Any]
) -> None:
    with pytest.raises(error, match="^" + re.escape(message).replace(r"\.\.", ".*")):
        rel_attention(**call | change)


@pytest.mark.parametrize("name", TENSORS)
def test_last_axis_must_be_contiguous(call: dict[str, Any], name: str) -> None:
    inputs = call | dict(zip(("k_mem", "v_mem"), call["memory"], strict=True))
    inputs[name] = torch.zeros(*inputs[name].shape, 2)[..., 0]
    del inputs["memory"]
    with pytest.raises(ValueError, match=rf"{name} must be contiguous along its last axis \(stride 1\), got stride 2"):
        rel_attention(**as_call(inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_native_refuses_other_dtypes_by_name(call: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = as_call(make_inputs(Case(), dtype))
    with pytest.raises(RuntimeError, match="backend='native' cannot run: native takes float32 and bfloat16, not float"):
        rel_attention(**inputs, backend="native")
    # backend=None takes the reference, with a warning where a user may expect kernels.
    WARN_ONCE.value.cache_clear()
    warned = pytest.warns(RuntimeWarning, match="slow reference backend on the cpu: native takes float32 and bfloat16")
    with warned if dtype == torch.float16 else contextlib.nullcontext():
        assert rel_attention(**inputs).dtype == dtype


def test_native_refuses_other_devices() -> None:
    inputs = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in make_inputs(Case()).items()}
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run: native runs on the cpu, not on meta"):
        rel_attention(**as_call(inputs), backend="native")


def test_second_derivative_of_native_points_to_the_reference(call: dict[str, Any]) -> None:
    out = rel_attention(**call, backend="native")
    (dq,) = torch.autograd.grad(out.sum(), call["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative; call rel_attention\(..., backend='ref"):
        dq.sum().backward()


def test_missing_native_module_is_reported(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.native, "module", None)
    monkeypatch.setattr(cpu.native, "why_not_loaded", "the C++ module could not be loaded: nothing there")
    with pytest.raises(RuntimeError, match=r"backend='native' cannot run: .*nothing there"):
        rel_attention(**call, backend="native")
    assert available_backends("cpu") == ["reference"]
    with pytest.warns(RuntimeWarning, match="slow reference backend on the cpu"):
        rel_attention(**call)


def test_int64_bounds_are_accepted(call: dict[str, Any]) -> None:
    bound = torch.tensor([3, 4, 5, 6])
    assert torch.equal(rel_attention(**{**call, "start": bound}), rel_attention(**{**call, "start": bound.int()}))


@pytest.mark.parametrize("window", [2**31 + 1, 2**63, 2**70])
def test_windows_of_any_size(call: dict[str, Any], window: int) -> None:
    for backend in available_backends():
        got = rel_attention(**{**call, "window": window, "backend": backend})
        assert torch.equal(got, rel_attention(**{**call, "backend": backend}))


@pytest.mark.parametrize(("name", "instead"), [
    ("is_causal", "; pass causal"), ("attn_mask", r"; pass start and end, which txl_kernels\.intervals\(mask, visible="),
    ("softmax_scale", "; pass scale"), ("window_size", r"; pass window=\(left, right\)"), ("dropout", "; pass dropout_p,"),
    ("need_weights", "; pass nothing: rel_attention_weights"), ("k_mem", r"; pass memory=\(k_mem, v_mem\)"), ("windw", "$"),
])  # fmt: skip
def test_names_of_other_libraries_are_refused_with_ours(call: dict[str, Any], name: str, instead: str) -> None:
    keys = {x: call[x] for x in ("q", "k", "r")}
    for function, given in ((rel_attention, call), (rel_attention_weights, keys)):
        with pytest.raises(TypeError, match=f"^{function.__name__} takes no argument {name}{instead}"):
            function(**given, **{name: True})


def test_every_hint_is_of_a_name_that_is_not_ours() -> None:
    """dropout_p is a function's, attn_dropout a layer's: each is a hint for the other."""
    ours = {*inspect.signature(rel_attention).parameters, *inspect.signature(RelAttention).parameters}
    assert checks.FOREIGN.keys() & ours == {"dropout_p", "attn_dropout"}


@pytest.mark.parametrize("biases", [True, False])
def test_layout_of_flash_attention(biases: bool) -> None:
    """[B, L, H, D]: the table's heads are those of q's other axis."""
    q, u = zeros(B, L, H, D), zeros(H, D) if biases else None
    for table in ({"r": zeros(H, L, D)}, {"r": None, "r_bias": zeros(H, L)}):
        name = "r" if table["r"] is not None else "r_bias"
        w = u if name == "r" else None
        with pytest.raises(ValueError, match=rf"^{name} must be \[H, T.*flash-attn, pass q\.transpose\(1, 2\)"):
            rel_attention(q, q, q, content_bias=u, position_bias=w, **table)
        rel_attention(*[q.transpose(1, 2)] * 3, content_bias=u, position_bias=w, **table)


@pytest.mark.parametrize("name", ["start", "end"])
def test_ambiguous_bound_of_one_axis_is_refused(name: str) -> None:
    """One value for each batch row, [B], reads as one for each query where B == L: wrong values
    without an error."""
    call = as_call(make_inputs(Case(B=3, L=3, M=4, D=8), torch.float32))
    lengths = torch.tensor([4, 5, 6], dtype=INT)
    with pytest.raises(ValueError, match=rf"{name} must say whether .* B = L = 3: pass {name}\[:, None\] or"):
        rel_attention(**call | {name: lengths})
    for bound in (lengths[:, None], lengths[None], lengths[:1]):
        rel_attention(**call | {name: bound})


def test_numpy_scalars_are_accepted(call: dict[str, Any]) -> None:
    numpy = pytest.importorskip("numpy")
    given = {"window": numpy.int64(3), "zero_row": numpy.int32(0), "scale": numpy.float32(0.25)}
    want = rel_attention(**call | {"window": 3, "scale": 0.25})
    assert torch.equal(rel_attention(**call | given), want)


UNUSUAL = (
    None, True, 1, -1, 2**63, 2**70, 0.5, -1.5, 1e-320, math.nan, math.inf, 2 + 1j, "", "native", "\udcff", b"x", [], [1],
    {}, (), (None, None), object(), Fraction(5, 2), Decimal("2.5"), torch.tensor(2), torch.tensor([7]), torch.tensor([1.0]),
    torch.tensor([7], dtype=INT), torch.float32, int, torch.zeros(2, dtype=torch.complex64),
)  # fmt: skip


def unusual_tensors(x: torch.Tensor) -> list[Any]:
    """A tensor changed in ways that should be refused, or make no difference."""
    nested = torch.nested.nested_tensor([torch.zeros(2, 4, 8), torch.zeros(2, 3, 8)])
    return [
        x[None], x[0], x[..., :0], torch.cat([x, x]), x[:1].expand_as(x), x.half(), x.to(torch.complex64), x.to("meta"),
        x.to_sparse(), x.mT, x.flatten(), torch.nn.Parameter(x.clone()), x.conj(), x * 1e5, x.new_zeros(1).expand_as(x),
        nested, torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), x.tolist(),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", inspect.signature(rel_attention).parameters)
def test_unusual_values_are_refused_by_name_or_computed(call: dict[str, Any], name: str) -> None:
    """Any value of an argument gives an error that names an argument, or the reference's result."""
    given = call.get(name)
    values = (*UNUSUAL, *(unusual_tensors(given.detach()) if isinstance(given, torch.Tensor) else ()))
    if name == "memory":
        values = (*UNUSUAL, *((given[0], x) for x in (*UNUSUAL, *unusual_tensors(given[1].detach()))))
    names = re.compile("|".join((*inspect.signature(rel_attention).parameters, "k_mem", "v_mem")))
    for value in values:
        try:
            got = rel_attention(**call | {name: value})
        except (TypeError, ValueError, RuntimeError) as error:
            message = str(error)
            if not names.search(message) or len(message) > 600:
                pytest.fail(f"{name}={value!r:.80}: {message}")
            continue
        if name != "dropout_p" and name != "backend":
            want = rel_attention(**call | {name: value, "backend": "reference"})
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
                tolerance = 0.05 if a.dtype in (torch.float16, torch.bfloat16) else 2e-3
                if a.device.type != "meta":
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
