"""Values and gradients of every backend against the definition."""

from typing import Any

import pytest
import torch
from cases import BY_NAME, CASES, COMPOSED, DTYPES, PAIRS, TERMS, Case, as_call, here, make_inputs
from oracle import attend, gradients, ignores_what_no_query_sees, matches_the_definition, oracle
from tolerances import require_close

from txl_kernels import rel_attention
from txl_kernels.backends import cpu
from txl_kernels.call import Call


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("case", CASES + TERMS + COMPOSED + PAIRS, ids=str)
def test_matches_the_definition(case: Case, backend: str) -> None:
    matches_the_definition(case, backend)


@pytest.mark.parametrize(
    "name",  # one for each rewriting of a call
    ["no biases, a table of more rows", "bias alone for all heads, prefix, softcap",
     "bias and a table for each batch row, chunks", "every option"],
)  # fmt: skip
def test_composed_variants_compile_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    call = as_call(make_inputs(BY_NAME[name], torch.float32)) | {"return_lse": True}
    compiled = torch.compile(rel_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**call), rel_attention(**call))


def test_gradient_of_lse_alone(backend: str) -> None:
    case = CASES[0]
    inputs, exact = make_inputs(case, DTYPES[backend]), make_inputs(case)
    rel_attention(**as_call(inputs), return_lse=True, backend=backend)[1].sum().backward()
    oracle(exact)[1].sum().backward()
    for name in ("q", "k", "r", "content_bias", "position_bias", "k_mem"):
        require_close(inputs[name].grad, exact[name].grad, f"gradient of {name}")


@pytest.mark.parametrize("length", [5, 2])
def test_no_heads(length: int, backend: str) -> None:
    q, k, v = (torch.randn(2, 0, length, 8, dtype=DTYPES[backend], requires_grad=True) for _ in range(3))
    out = rel_attention(q, k, v, torch.randn(0, length, 8, dtype=DTYPES[backend]), backend=backend)
    out.sum().backward()
    assert out.shape == q.grad.shape == (2, 0, length, 8)


@pytest.mark.parametrize("layout", ["bhld", "lbhd"])
def test_dense_output_keeps_the_strides_of_q(layout: str, backend: str) -> None:
    inputs = make_inputs(Case(layout=layout), DTYPES[backend])
    assert backend == "reference" or rel_attention(**as_call(inputs), backend=backend).stride() == inputs["q"].stride()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, in Triton's interpreter
@pytest.mark.parametrize("length", [6, 3], ids=["prefill", "decode"])
def test_gradients_beside_sinks_of_any_size(length: int, backend: str) -> None:
    """Gradients of out and lse, for large scores and sinks from far below to far above them."""
    case = Case(H=4, Hkv=2, L=length, M=30, D=8, scale=20.0, sink="B H L")
    x, exact = make_inputs(case, DTYPES[backend]), make_inputs(case)
    for inputs in (x, exact):
        with torch.no_grad():
            inputs["sink"].mul_(150).add_(150)
    got, want = attend(x, backend=backend), attend(exact, backend="reference")
    given, wanted = gradients(*got, x), gradients(*want, exact)
    for name in wanted:
        error = (given[name].double() - wanted[name]).norm() / wanted[name].norm()
        assert error <= 1e-4, f"gradient of {name}: {error:.1e}"  # of scores of hundreds in float32


def test_softcap_of_scores_of_any_size(backend: str) -> None:
    """Where each query sees one key, lse is its capped score: against torch's tanh in float64."""
    sizes = torch.cat([torch.logspace(-12, 3, 96), torch.linspace(0.5, 0.7, 32)]).repeat_interleave(2)
    sizes[::2] *= -1
    inputs = make_inputs(Case(B=1, H=1, L=256, M=0, D=1, window=1, scale=1.0, softcap=2.0), DTYPES[backend])
    with torch.no_grad():
        inputs["q"].copy_(2.0 * here(sizes).view(1, 1, -1, 1))
        inputs["k"].fill_(1.0)
        for name in ("r", "content_bias", "position_bias"):
            inputs[name].zero_()
    _, lse = attend(inputs, backend=backend)
    want = 2.0 * (inputs["q"].detach().double() / 2.0).tanh().flatten(2)
    assert ((lse.double() - want).abs() <= 2e-6 * want.abs()).all()


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("length", [6, 3], ids=["prefill", "decode"])
def test_nan_in_a_visible_key_shows(payload: int, length: int, backend: str) -> None:
    """A NaN of any bits is not turned into a number by arithmetic on them."""
    inputs = make_inputs(Case(L=length), DTYPES[backend])
    with torch.no_grad():
        inputs["k"][0, 0, 2, 0] = torch.tensor([payload], dtype=torch.uint32).view(torch.float32)
    out = rel_attention(**as_call(inputs), backend=backend)
    assert out[0, 0, 2:].isnan().all()
    assert out[1].isfinite().all()
    assert out[0, 1].isfinite().all()


def interval(start: list[Any], end: list[Any] | None = None) -> dict[str, torch.Tensor]:
    given = {"start": start} if end is None else {"start": start, "end": end}
    return {name: torch.tensor(x, dtype=torch.int32) for name, x in given.items()}


UNSEEN: dict[str, tuple[Case, dict[str, torch.Tensor]]] = {
    "memory not filled yet, padding": (
        Case(L=70, M=300, H=1), interval([[250], [300]], [[365], [360]])),
    "rows of r past the last distance": (Case(L=41, M=70, B=1, H=1, extra_rows=60), {}),
    "memory before a window of one": (Case(L=4, M=70, window=1), {}),
    "memory before a window": (Case(L=4, M=70, window=3), {}),
    "decode": (Case(L=2, M=700, B=1, H=1), interval([[650]])),
    "padding between documents": (Case(M=0), interval([[0, 0, 0, 3, 3, 3]], [[2, 2, 2, 6, 6, 6]])),
    "queries that see nothing": (Case(intervals="alternate"), {}),
}  # fmt: skip


@pytest.mark.usefixtures("the_same_bits")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_query_sees_may_hold_anything(name: str, backend: str) -> None:
    """NaN there reaches no output and no gradient."""
    case, bounds = UNSEEN[name]
    ignores_what_no_query_sees(case, DTYPES[backend], backend, bounds)


def test_fused_projections_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels get the very storage of q, k, v and the memory."""
    inputs = make_inputs(Case(layout="fused"), torch.float32)
    seen: list[Call] = []
    real = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda call, *rest: (seen.append(call), real(call, *rest))[1])
    rel_attention(**as_call(inputs), backend="native")
    for name in ("q", "k", "v", "k_mem", "v_mem"):
        assert getattr(seen[0], name).data_ptr() == inputs[name].data_ptr(), name


def test_tensors_that_overlap_themselves(backend: str) -> None:
    base = torch.randn(1, 1, 13, dtype=DTYPES[backend])
    inputs = make_inputs(Case(B=1, H=1), DTYPES[backend])
    windows = {name: base.clone().unfold(2, 8, 1) for name in ("q", "k", "v")}
    assert windows["q"].stride()[-2:] == (1, 1)
    want = rel_attention(**{**as_call(inputs), **{n: x.contiguous() for n, x in windows.items()}}, backend=backend)
    for x in windows.values():
        x.requires_grad_()
    got = rel_attention(**{**as_call(inputs), **windows}, backend=backend)
    torch.testing.assert_close(got, want)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), list(windows.values())))


@pytest.mark.parametrize("width", [128, 256, 300])
def test_wide_heads(width: int, backend: str) -> None:
    if width > 256 and backend == "triton":
        pytest.skip("triton takes head widths up to 256")
    matches_the_definition(Case(B=1, H=1, D=width), backend)
