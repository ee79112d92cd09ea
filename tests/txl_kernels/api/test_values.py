"""Values and gradients of every backend against the definition."""

import pytest
import torch
from cases import CASES, DTYPES, FORMS, INKLING, TERMS, Case, as_call, here, make_inputs
from oracle import attend, gradients, matches_the_definition, oracle
from tolerances import require_close

from txl_kernels import rel_attention
from txl_kernels.backends import cpu
from txl_kernels.call import Call


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("case", CASES + TERMS + FORMS + INKLING, ids=str)
def test_matches_the_definition(case: Case, backend: str) -> None:
    matches_the_definition(case, backend)


def test_gradient_of_lse_alone(backend: str) -> None:
    case = CASES[0]
    inputs, exact = make_inputs(case, DTYPES[backend]), make_inputs(case)
    rel_attention(**as_call(inputs), return_lse=True, backend=backend)[1].sum().backward()
    oracle(exact)[1].sum().backward()
    for name in ("q", "k", "r", "content_bias", "position_bias", "k_mem"):
        require_close(inputs[name].grad, exact[name].grad, f"gradient of {name}")


def test_memory_none_equals_empty_memory(backend: str) -> None:
    inputs = make_inputs(Case("", M=0), DTYPES[backend])
    call = as_call(inputs)
    assert torch.equal(
        rel_attention(**call, backend=backend), rel_attention(**{**call, "memory": None}, backend=backend)
    )


@pytest.mark.parametrize("length", [5, 2])
def test_no_heads(length: int, backend: str) -> None:
    q, k, v = (torch.randn(2, 0, length, 8, dtype=DTYPES[backend], requires_grad=True) for _ in range(3))
    out = rel_attention(q, k, v, torch.randn(0, length, 8, dtype=DTYPES[backend]), backend=backend)
    out.sum().backward()
    assert out.shape == q.grad.shape == (2, 0, length, 8)


@pytest.mark.parametrize("layout", ["bhld", "lbhd"])
def test_dense_output_keeps_the_strides_of_q(layout: str, backend: str) -> None:
    inputs = make_inputs(Case("", layout=layout), DTYPES[backend])
    assert backend == "reference" or rel_attention(**as_call(inputs), backend=backend).stride() == inputs["q"].stride()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, in Triton's interpreter
@pytest.mark.parametrize("length", [6, 3], ids=["packed", "few queries"])
def test_gradients_beside_sinks_of_any_size(length: int, backend: str) -> None:
    """Gradients of out and lse, for large scores and sinks from far below to far above them."""
    case = Case("", H=4, Hkv=2, L=length, M=30, D=8, scale=20.0, sink="queries")
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
    inputs = make_inputs(Case("", B=1, H=1, L=256, M=0, D=1, window=1, scale=1.0, softcap=2.0), DTYPES[backend])
    with torch.no_grad():
        inputs["q"].copy_(2.0 * here(sizes).view(1, 1, -1, 1))
        inputs["k"].fill_(1.0)
        for name in ("r", "content_bias", "position_bias"):
            inputs[name].zero_()
    _, lse = attend(inputs, backend=backend)
    want = 2.0 * (inputs["q"].detach().double() / 2.0).tanh().flatten(2)
    assert ((lse.double() - want).abs() <= 2e-6 * want.abs()).all()


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("length", [6, 3], ids=["packed", "few queries"])
def test_nan_in_a_visible_key_shows(payload: int, length: int, backend: str) -> None:
    """Whatever its bits: arithmetic on them must not make a number of it."""
    inputs = make_inputs(Case("", L=length), DTYPES[backend])
    with torch.no_grad():
        inputs["k"][0, 0, 2, 0] = torch.tensor([payload], dtype=torch.uint32).view(torch.float32)
    out = rel_attention(**as_call(inputs), backend=backend)
    assert out[0, 0, 2:].isnan().all()
    assert out[1].isfinite().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.usefixtures("the_same_bits")
def test_what_no_query_sees_may_hold_anything(backend: str) -> None:
    """A memory that is not filled yet, padding, spare rows of r: NaN there reaches no output and no
    gradient."""
    case = Case("", L=70, M=300, B=2, H=1, D=8)
    bounds = {"start": torch.tensor([[250], [300]], dtype=torch.int32), "end": torch.tensor([[365], [360]])}

    def run(spoil: bool) -> list[torch.Tensor]:
        inputs = make_inputs(case, DTYPES[backend])
        if spoil:
            with torch.no_grad():
                for name in ("k_mem", "v_mem"):
                    inputs[name][0, :, :250] = inputs[name][1] = torch.nan
                for name in ("k", "v"):
                    inputs[name][0, :, 65:] = inputs[name][1, :, 60:] = torch.nan
                inputs["r"][:, 120:] = torch.nan
        out, lse = rel_attention(**{**as_call(inputs), **bounds}, return_lse=True, backend=backend)
        return [out, lse, *gradients(out, lse, inputs).values()]

    for spoiled, clean in zip(run(True), run(False), strict=True):
        assert spoiled.isfinite().all()
        assert torch.equal(spoiled, clean)


@pytest.mark.usefixtures("the_same_bits")
def test_rows_of_r_past_the_last_distance_may_hold_anything(backend: str) -> None:
    """Blocks of queries reach past the segment's end, and so past the distances in use."""
    inputs = make_inputs(Case("", L=41, M=70, B=1, H=1, extra_rows=60), DTYPES[backend])
    clean = {**inputs, "r": inputs["r"].detach().clone().requires_grad_()}
    with torch.no_grad():
        inputs["r"][:, 111:] = torch.nan
    results = []
    for x in (inputs, clean):
        out, lse = rel_attention(**as_call(x), return_lse=True, backend=backend)
        results.append([out, lse, *gradients(out, lse, x).values()])
    for spoiled, want in zip(*results, strict=True):
        assert torch.equal(spoiled, want)


@pytest.mark.usefixtures("the_same_bits")
@pytest.mark.parametrize("window", [1, 3])
def test_memory_before_the_window_may_hold_anything(window: int, backend: str) -> None:
    """More of it than the segment is long, so that nothing may be read in its place either."""
    case = Case("", L=4, M=70, window=window)

    def run(spoil: bool) -> list[torch.Tensor]:
        inputs = make_inputs(case, DTYPES[backend])
        if spoil:
            with torch.no_grad():
                for name in ("k_mem", "v_mem"):
                    inputs[name][:, :, : 70 - window + 1] = torch.nan
        out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
        return [out, lse, *gradients(out, lse, inputs).values()]

    for spoiled, clean in zip(run(True), run(False), strict=True):
        assert torch.equal(spoiled, clean)


def test_a_few_queries_ignore_what_they_do_not_see(backend: str) -> None:
    inputs = make_inputs(Case("", L=2, M=700, B=1, H=1), DTYPES[backend])
    start = torch.tensor([[650]], dtype=torch.int32)
    want = rel_attention(**{**as_call(inputs), "start": start}, backend=backend)
    with torch.no_grad():
        inputs["k_mem"][:, :, :650] = inputs["v_mem"][:, :, :650] = torch.nan
    assert torch.equal(rel_attention(**{**as_call(inputs), "start": start}, backend=backend), want)


@pytest.mark.usefixtures("the_same_bits")
def test_unseen_keys_between_seen_ones_may_hold_anything(backend: str) -> None:
    """Documents with padding between them."""
    bounds = {"start": torch.tensor([[0, 0, 0, 3, 3, 3]]), "end": torch.tensor([[2, 2, 2, 6, 6, 6]])}

    def run(spoil: bool) -> list[torch.Tensor]:
        inputs = make_inputs(Case("", M=0), DTYPES[backend])
        if spoil:
            with torch.no_grad():
                inputs["k"][:, :, 2] = inputs["v"][:, :, 2] = torch.nan
        out, lse = rel_attention(**{**as_call(inputs), **bounds}, return_lse=True, backend=backend)
        return [out, lse, *gradients(out, lse, inputs).values()]

    for spoiled, clean in zip(run(True), run(False), strict=True):
        assert torch.equal(spoiled, clean)


def test_queries_that_see_nothing_may_hold_anything(backend: str) -> None:
    case = Case("", intervals="empty")
    inputs = make_inputs(case, DTYPES[backend])
    with torch.no_grad():
        inputs["q"][:, :, ::2] = torch.nan
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    assert out.isfinite().all()
    for name, gradient in gradients(out, lse, inputs).items():
        assert gradient.isfinite().all(), name


def test_fused_projections_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels get the very storage of q, k, v and the memory."""
    inputs = make_inputs(Case("", layout="fused"), torch.float32)
    seen: list[Call] = []
    real = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda call, *rest: (seen.append(call), real(call, *rest))[1])
    rel_attention(**as_call(inputs), backend="native")
    for name in ("q", "k", "v", "k_mem", "v_mem"):
        assert getattr(seen[0], name).data_ptr() == inputs[name].data_ptr(), name


def test_tensors_that_overlap_themselves(backend: str) -> None:
    base = torch.randn(1, 1, 13, dtype=DTYPES[backend])
    inputs = make_inputs(Case("", B=1, H=1), DTYPES[backend])
    windows = {name: base.clone().unfold(2, 8, 1) for name in ("q", "k", "v")}
    assert windows["q"].stride()[-2:] == (1, 1)
    want = rel_attention(**{**as_call(inputs), **{n: x.contiguous() for n, x in windows.items()}}, backend=backend)
    for x in windows.values():
        x.requires_grad_()
    got = rel_attention(**{**as_call(inputs), **windows}, backend=backend)
    torch.testing.assert_close(got, want)
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), list(windows.values())))


def test_wide_heads(backend: str) -> None:
    for width in (128, 256) if backend == "triton" else (128, 256, 300):
        case = Case("", B=1, H=1, D=width)
        out = rel_attention(**as_call(make_inputs(case, DTYPES[backend])), backend=backend)
        require_close(out, oracle(make_inputs(case))[0], "out")
