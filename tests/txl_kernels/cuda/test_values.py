"""The CUDA decode kernels against the definition: their source run by the SIMT emulation, and on a
GPU."""

import itertools
import re

import pytest
import torch
from cases import Case, as_call, as_fields, make_inputs
from cuda_cases import INKLING, MATRIX, forward, inkling, use, within_the_error_budget
from cuda_emulation import build, plan_of
from oracle import ignores_what_no_query_sees, matches_the_definition, oracle

from txl_kernels import rel_attention
from txl_kernels.backends import cuda, route
from txl_kernels.backends.limits import DECODE, DECODE_QUERIES
from txl_kernels.backends.self_check import compare, kind_of

pytestmark = pytest.mark.slow  # compiling the emulation takes a minute and a half of processor time


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "MIN_PREFILL_QUERIES", DECODE_QUERIES + 1)
    if request.param == "emulated":
        use(monkeypatch, build())


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("case", MATRIX + INKLING, ids=str)
@torch.no_grad()
def test_matches_the_definition(case: Case) -> None:
    matches_the_definition(case, "cuda", torch.float32)


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in MATRIX + INKLING if c.B * c.L], ids=str)
@torch.no_grad()
def test_error_budget_of_half_precision(case: Case, dtype: torch.dtype) -> None:
    within_the_error_budget(case, dtype)


@pytest.mark.usefixtures("nan_filled")
def test_any_split_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(L=3, M=445, D=16, B=1, H=2)
    want = oracle(make_inputs(case))[0].detach()
    seen = set()
    for multiprocessors in (1, 4, 132):
        use(monkeypatch, build(), multiprocessors)
        results = [forward(case, torch.float32) for _ in range(2)]
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][0].double(), want, rtol=0, atol=2e-5)
        seen.add(plan_of(1, 2, 3, 445, 16, module=build(), multiprocessors=multiprocessors).parts)
    assert seen == {3, 4, 7}


@pytest.mark.usefixtures("nan_filled")
def test_any_split_of_keys_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink joins the sum of weights once, in one part or where parts are merged; blocks of a
    group have as many queries as fit."""
    for group, parts in ((3, [2, 4, 7]), (8, [1, 2, 7])):
        case = inkling("", group, 4, 100, M=440, B=1, H=group, Hkv=1, sink="B H L")
        inputs = make_inputs(case)
        want, want_lse = oracle(inputs)
        call = as_fields(make_inputs(case.but(sink=None), torch.float32))._replace(sink=torch.zeros(1, group, 4))
        found = []
        for multiprocessors in (1, 2, 132):
            use(monkeypatch, build(), multiprocessors)
            (out, lse), again = (forward(case, torch.float32) for _ in range(2))
            assert torch.equal(out, again[0])
            torch.testing.assert_close(out.double(), want.detach(), rtol=0, atol=2e-5)
            torch.testing.assert_close(lse.double(), want_lse.detach(), rtol=0, atol=2e-5)
            found.append(build().DecodePlan(call, call.q, 0, 0, multiprocessors, -1).parts)
        assert found == parts


def test_splits_fill_the_device() -> None:
    """8 heads on 132 multiprocessors: one block for each where there are enough keys; full
    waves."""
    for L, M, D, dtype in itertools.product((1, 4, 16), (800, 3800, 32768), (64, 128, 256), DECODE.dtypes[:2]):
        chosen = plan_of(1, 8, L, M, D, dtype, module=build())
        assert chosen.parts * chosen.part_keys >= M + L
        assert (chosen.parts - 1) * chosen.part_keys < M + L
        assert 8 * chosen.parts >= min(132, 8 * ((M + L) // 64))
    for B, M, window, parts, keys in (
        (1, 3800, None, 60, 64), (8, 3800, None, 8, 512), (64, 3800, None, 10, 384), (64, 800, None, 2, 448),
        (1, 32768, 512, 8, 64),
    ):  # fmt: skip
        chosen = plan_of(B, 8, 1, M, 64, module=build(), window=window)
        assert (chosen.parts, chosen.part_keys) == (parts, keys)


@pytest.mark.usefixtures("kernels")
def test_bounds_out_of_range_give_nan_to_their_query_alone() -> None:
    case = Case(L=4, M=5, D=8)
    inputs = as_call(make_inputs(case, torch.float32))
    start = torch.zeros(2, 4, dtype=torch.int32)
    start[0, 1], start[1, 2] = -1, case.S + 1
    with torch.no_grad():
        out, lse = rel_attention(**inputs | {"start": start}, return_lse=True, backend="cuda")
        want = rel_attention(**inputs | {"start": start.clamp(0, case.S)}, backend="reference")
    bad = (start < 0) | (start > case.S)
    assert out.isnan().all(-1).eq(bad[:, None]).all()
    assert lse.isnan().eq(bad[:, None]).all()
    good = ~bad[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[good], want[good], rtol=0, atol=2e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bounds", [{}, {"start": [[3, 40]], "end": [[10, 52]]}], ids=["window", "two sequences"])
@torch.no_grad()
def test_rows_that_no_query_sees_may_hold_nan(bounds: dict[str, list[list[int]]]) -> None:
    case = Case(L=2, M=50, D=16, B=1) if bounds else Case(L=3, M=200, D=16, B=1, window=50)
    given = {name: torch.tensor(x, dtype=torch.int32) for name, x in bounds.items()}
    ignores_what_no_query_sees(case, torch.float32, "cuda", given)


@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_rows_that_no_query_of_a_group_sees_may_hold_nan() -> None:
    for case in (
        inkling("", 3, 3, 203, M=200, window=50, outside="refuse"),
        inkling("", 3, 2, 52, M=50, B=1, outside="refuse", r="H T Dp"),
    ):
        bounds = {} if case.window else {"start": torch.tensor([[3, 40]]).int(), "end": torch.tensor([[10, 52]]).int()}
        ignores_what_no_query_sees(case, torch.float32, "cuda", bounds)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("zero_row", [0, 2])
@torch.no_grad()
def test_nothing_is_read_outside_the_table(zero_row: int) -> None:
    """Rows before and after r hold NaN, also where a query has a position term of 0 for them."""
    case = inkling("", 3, 4, 66, M=150, zero_row=zero_row, causal=False)
    inputs = as_call(make_inputs(case, torch.float32))
    around = torch.full((1, case.T + 20, case.Dp), torch.nan)
    r = around[:, 10:-10].copy_(inputs["r"])
    want = rel_attention(**inputs, backend="cuda")
    assert want.isfinite().all()
    assert torch.equal(rel_attention(**inputs | {"r": r}, backend="cuda"), want)


@pytest.mark.usefixtures("kernels")
@torch.no_grad()
def test_sinks_of_any_strides_and_sizes() -> None:
    """-inf is no sink, inf leaves nothing of the values, and bounds out of range give NaN."""
    inputs = as_call(make_inputs(inkling("", 3, 3, 20, M=300), torch.float32))
    sink = torch.randn(3, 12, 2)[:, ::2].permute(2, 1, 0)
    for given in (sink, torch.full((6,), -torch.inf), torch.full((6,), torch.inf), torch.full((6,), 300.0)):
        x = inputs | {"sink": given}
        out, lse = rel_attention(**x, return_lse=True, backend="cuda")
        want = rel_attention(**x, return_lse=True, backend="reference")
        torch.testing.assert_close((out, lse), want, rtol=0, atol=2e-5)
    out = rel_attention(**inputs | {"start": torch.tensor([[0, -1, 400]], dtype=torch.int32)}, backend="cuda")
    assert torch.equal(out.isnan().all(-1), torch.tensor([False, True, True]).expand(2, 6, 3))


@pytest.mark.usefixtures("kernels")
def test_self_check_of_the_terms() -> None:
    """One and three queries, of which two heads read one head of keys: an instance for up to four
    queries of a block, and one for up to sixteen."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in DECODE.dtypes:
        kind = kind_of("cuda", as_fields(make_inputs(inkling("", 2, 2, 9, D=16), dtype)), gradients=False)
        assert kind.decode
        assert kind.terms == ("r", "q_pos", "sink")
        assert kind.grouped
        assert kind.options == ("zero_outside",)
        assert compare(cuda, kind._replace(device=device, head_width=64, position_width=16)) is None


@pytest.mark.usefixtures("kernels")
def test_refused_terms() -> None:
    def call(case: Case) -> None:
        rel_attention(**as_call(make_inputs(case, torch.float32)), backend="cuda")

    with torch.no_grad():
        call(inkling("", 3, 4, 9))
        for message, changed in {
            "q_pos, got [2, 6, 5, 16], for more than 4 queries (L), got 5": {"L": 5},
            "multiples of 8 up to q's 24, got 4": {"Dp": 4},
            "multiples of 8 up to q's 24, got 32": {"Dp": 32},
            "softcap, got 2.0": {"softcap": 2.0},
            "r_bias": {"r_bias": "H T"},
            "values of another width": {"Dv": 8},
        }.items():
            with pytest.raises(RuntimeError, match=re.escape(message)):
                call(inkling("", 3, **{"L": 3, "T": 9} | changed))
        for case, message in (
            (Case(L=5, D=8, sink="H"), "sink, got [2, 2, 5], for more than 4 queries (L), got 5"),
            (Case(L=5, D=8, H=4, Hkv=2), "grouped heads, got 2 heads of k for 4 of q, for more than 4"),
            (Case(L=5, D=8, T=3, zero_row=0, outside="zero"), "outside='zero', for more than 4"),
        ):
            with pytest.raises(RuntimeError, match=re.escape(message)):
                call(case)
    with pytest.raises(RuntimeError, match="not float32, as the kernels do that compute gradients"):
        call(inkling("", 3, 3, 9))


@pytest.mark.usefixtures("kernels")
def test_refused_calls() -> None:
    def call(case: Case, dtype: torch.dtype = torch.float32) -> None:
        rel_attention(**as_call(make_inputs(case, dtype)), backend="cuda")

    with torch.no_grad():
        call(Case(L=16, D=8))
        wide = torch.zeros(1, 1, 1, 8).expand(1, 1, DECODE.keys, 8)
        query, bias = torch.zeros(1, 1, 1, 8), torch.zeros(1, 8)
        rows = torch.zeros(1, 1, 8).expand(1, DECODE.keys + 1, 8)
        with pytest.raises(RuntimeError, match="at most 8388608 keys"):
            rel_attention(query, query, query, rows, bias, bias, (wide, wide), backend="cuda")
        rel_attention(query, query, query, rows, bias, bias, (wide, wide), window=9, backend="cuda")
        with pytest.raises(RuntimeError, match="multiples of 8 up to 256, not 41"):
            call(Case(D=41))
        with pytest.raises(RuntimeError, match="multiples of 8 up to 256, not 264"):
            call(Case(D=264))
        with pytest.raises(RuntimeError, match="not float64"):
            call(Case(D=8), torch.float64)
