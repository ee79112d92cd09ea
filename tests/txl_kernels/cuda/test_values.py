"""The CUDA decode kernels against the definition: their source run by the SIMT emulation, and on a
GPU."""

import itertools

import pytest
import torch
from cases import Case, as_call, make_inputs
from cuda_cases import MATRIX, forward, use, within_the_error_budget
from cuda_emulation import build, plan_of
from oracle import ignores_what_no_query_sees, matches_the_definition, oracle

from txl_kernels import rel_attention
from txl_kernels.backends import cuda


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MIN_HOPPER_QUERIES", cuda.MAX_DECODE_QUERIES + 1)
    if request.param == "emulated":
        use(monkeypatch, build())


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("case", MATRIX, ids=str)
@torch.no_grad()
def test_matches_the_definition(case: Case) -> None:
    matches_the_definition(case, "cuda", torch.float32)


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in MATRIX if c.B * c.L], ids=str)
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


def test_splits_fill_the_device() -> None:
    """8 heads on 132 multiprocessors: one block for each where there are enough keys; full
    waves."""
    for L, M, D, dtype in itertools.product((1, 4, 16), (800, 3800, 32768), (64, 128, 256), cuda.DTYPES[:2]):
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
def test_refused_calls() -> None:
    def call(case: Case, dtype: torch.dtype = torch.float32) -> None:
        rel_attention(**as_call(make_inputs(case, dtype)), backend="cuda")

    with torch.no_grad():
        call(Case(L=16, D=8))
        wide = torch.zeros(1, 1, 1, 8).expand(1, 1, cuda.MAX_DECODE_KEYS, 8)
        query, bias = torch.zeros(1, 1, 1, 8), torch.zeros(1, 8)
        rows = torch.zeros(1, 1, 8).expand(1, cuda.MAX_DECODE_KEYS + 1, 8)
        with pytest.raises(RuntimeError, match="at most 8388608 keys"):
            rel_attention(query, query, query, rows, bias, bias, (wide, wide), backend="cuda")
        rel_attention(query, query, query, rows, bias, bias, (wide, wide), window=9, backend="cuda")
        with pytest.raises(RuntimeError, match="multiples of 8 up to 256, not 41"):
            call(Case(D=41))
        with pytest.raises(RuntimeError, match="multiples of 8 up to 256, not 264"):
            call(Case(D=264))
        with pytest.raises(RuntimeError, match="not float64"):
            call(Case(D=8), torch.float64)
