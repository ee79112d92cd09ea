"""The Hopper kernels against the float64 definition: their own source run by the emulation, and on
a GPU."""

import ctypes
from typing import Any

import pytest
import torch
from cases import TENSORS, Case, as_call, as_fields, make_inputs
from cuda_cases import HOPPER, SPLIT, require_error_budget, use
from cuda_emulation import build, plan_of
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import gradients, ignores_what_no_query_sees, matches_the_reference

from txl_kernels import rel_attention
from txl_kernels.backends import cuda
from txl_kernels.backends.self_check import Kind, compare

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def emulated() -> Any:
    return build()


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "emulated":
        use(monkeypatch, request.getfixturevalue("emulated"), multiprocessors=1)
    elif torch.cuda.get_device_capability() != cuda.HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(HOPPER)], ids=str)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    require_error_budget(*matches_the_reference(case, dtype, "cuda"), case, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in SHAPES if case.D % 8 == 0], ids=str)
def test_at_most_twice_the_error_of_eager(case: Case, dtype: torch.dtype) -> None:
    require_at_most_twice_eager(case, dtype, "cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_r_in_a_fixed_order(width: int) -> None:
    """Against the same in any order; the same bits in two runs."""
    case = Case(B=1, H=2, L=150, M=40, D=width)

    def run(fixed: bool) -> dict[str, torch.Tensor]:
        inputs = make_inputs(case, torch.bfloat16)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(fixed)
        try:
            return gradients(*rel_attention(**as_call(inputs), return_lse=True, backend="cuda"), inputs)
        finally:
            torch.use_deterministic_algorithms(before)

    fixed, again, free = run(True), run(True), run(False)
    for name, x in fixed.items():
        assert torch.equal(x, again[name]), name
        torch.testing.assert_close(x, free[name], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(40, DTYPES[1]), (64, DTYPES[0]), (128, DTYPES[1])], ids=str)
def test_the_first_calls_small_case(dtype: torch.dtype, width: int, decode: bool) -> None:
    """Every gradient within a few percent of its own norm, sums that cancel (the biases') among
    them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert compare(cuda, Kind("cuda", device, dtype, width, decode, True)) is None


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_keys_are_split_where_there_are_few_programs(
    case: Case, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, parts = [], []
    for multiprocessors in (1, 8, 132):
        use(monkeypatch, emulated, multiprocessors)
        plan = plan_of(1, 1, case.L, case.M, 64, torch.bfloat16, module=emulated, multiprocessors=multiprocessors)
        parts.append((plan.parts, plan.backward_parts))
        inputs = make_inputs(case, torch.bfloat16)
        out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="cuda")
        results.append((out, lse, gradients(out, lse, inputs)))
    assert parts[0] == (1, 1) < min(parts[1:])
    assert all(forward > 1 and backward > 1 for forward, backward in parts[1:])
    whole_out, whole_lse, whole = results[0]
    for out, lse, found in results[1:]:
        torch.testing.assert_close(out, whole_out, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-4)
        for name, x in found.items():
            torch.testing.assert_close(x, whole[name], rtol=2e-2, atol=2e-2, msg=lambda text, n=name: f"{n}: {text}")


def test_parts_fill_the_rounds_of_blocks(emulated: Any) -> None:
    """As num_splits_heuristic of FA2's flash_api.cpp chooses them, for blocks of 128 queries."""
    for heads, memory, parts in ((1, 4000, 13), (66, 4000, 2), (67, 4000, 5), (80, 8000, 3), (106, 4000, 1)):
        assert plan_of(1, heads, 64, memory, 64, torch.bfloat16, module=emulated).parts == parts


@pytest.mark.usefixtures("kernels", "the_same_bits")
@pytest.mark.parametrize("start", [None, 151])
def test_rows_that_no_query_sees_may_hold_nan(start: int | None) -> None:
    bounds = {} if start is None else {"start": torch.full((1, 1), start, dtype=torch.int32)}
    case = Case(L=80, M=200, D=64, B=1, window=50, extra_rows=40)
    ignores_what_no_query_sees(case, torch.bfloat16, "cuda", bounds)


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("width", [64, 128])
def test_queries_that_see_nothing_may_hold_and_get_anything(width: int) -> None:
    inputs = make_inputs(Case(L=150, M=40, D=width, B=1, intervals="alternate"), torch.bfloat16)
    with torch.no_grad():
        inputs["q"][:, :, ::2] = torch.nan
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="cuda")
    assert out.isfinite().all()
    cotangents = torch.ones_like(out), torch.ones_like(lse)
    for x in cotangents:
        x[:, :, ::2] = torch.nan
    leaves = [inputs[name] for name in TENSORS]
    for name, gradient in zip(TENSORS, torch.autograd.grad((out, lse), leaves, cotangents), strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [-(2.0**15), 2.0**20, -(2.0**30), 2.0**100])
def test_gradients_of_scores_too_large_are_not_numbers(size: float) -> None:
    """And those of others are right to a percent; results are right for all."""
    inputs = make_inputs(Case(L=20, M=50, B=1, D=64, causal=False, scale=1.0), torch.bfloat16)
    with torch.no_grad():
        for name in ("q", "k", "k_mem", "r", "content_bias", "position_bias"):
            inputs[name].zero_()
        inputs["q"][..., 0] = 1
        for name in ("k", "k_mem"):
            inputs[name][..., 0] = size
    out, _ = rel_attention(**as_call(inputs), return_lse=True, backend="cuda")
    mean = torch.cat([inputs["v_mem"], inputs["v"]], 2).float().mean(2, keepdim=True)
    torch.testing.assert_close(out.float(), mean.expand(out.shape), rtol=0, atol=5e-3)
    dv, dk = torch.autograd.grad(out.sum(), [inputs["v"], inputs["k"]])
    if abs(size) > 45_000:
        assert dv.isnan().all()
        assert dk.isnan().all()
    else:
        torch.testing.assert_close(dv.float(), torch.full(dv.shape, 20 / 70), rtol=2e-2, atol=0)


@pytest.mark.usefixtures("kernels")
def test_bounds_out_of_range_are_their_querys_own() -> None:
    """Its result is NaN; gradients of others stay right."""
    inputs = make_inputs(Case(L=100, M=40, D=64, B=1, H=1), torch.bfloat16)
    start = torch.zeros(1, 100, dtype=torch.int32)
    inputs["start"] = start
    start[:, 30] = 1000
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="cuda")
    bad = out.isnan()
    assert bad[:, :, 30].all()
    assert bad.sum() == 64
    for name, gradient in gradients(out, lse, inputs).items():
        assert gradient.isfinite().all(), name


@pytest.mark.usefixtures("kernels")
def test_only_wanted_gradients() -> None:
    case = Case(L=70, M=40, D=64, B=1, H=1)
    whole = make_inputs(case, torch.bfloat16)
    leaves = {name: whole[name] for name in TENSORS}
    out = rel_attention(**as_call(whole), backend="cuda")
    want = dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    for name in want:
        x = make_inputs(case, torch.bfloat16)
        for other in want:
            x[other].requires_grad_(other == name)
        out = rel_attention(**as_call(x), backend="cuda")
        (got,) = torch.autograd.grad(out.sum(), [x[name]])
        torch.testing.assert_close(got, want[name], rtol=2e-2, atol=2e-2)


def test_what_it_does_not_take(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
        rel_attention(**as_call(make_inputs(case, dtype)), backend="cuda")

    use(monkeypatch, emulated, capability=(8, 0))
    with pytest.raises(
        RuntimeError, match=r"compute capability 9\.0, this is 8\.0, as the kernels do that compute gradients"
    ):
        call(Case(L=2))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"this is 8\.0, as the kernels do that compute 17 queries"):
        call(Case(L=17, D=8))
    use(monkeypatch, emulated)
    with pytest.raises(RuntimeError, match="bfloat16 or float16, not float32"):
        call(Case(D=8), torch.float32)
    with pytest.raises(RuntimeError, match=r"head width .* of at most 128, not 136"):
        call(Case(D=136))
    once = make_inputs(Case(L=20, D=16), torch.bfloat16)
    memory = once["k_mem"]
    overlapping = memory.new_zeros(8 * memory.size(2) + 8).as_strided(memory.shape, (0, 0, 8, 1))
    for rows in (memory[:, :, :1].expand_as(memory), overlapping):
        with pytest.raises(RuntimeError, match=r"rows of k_mem apart, .* not strides"):
            rel_attention(**as_call(once | {"k_mem": rows}), backend="cuda")
    with pytest.raises(RuntimeError, match="rows of q apart, at multiples of 16 bytes"):
        call(Case(L=20, D=8, layout="fused"))


def test_more_than_a_grid_or_an_address_holds(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, emulated)
    call = as_fields(make_inputs(Case(L=20, D=8, B=1, H=1), torch.bfloat16))
    keys = torch.empty(1, 1, cuda.MAX_PREFILL_KEYS - 19, 8, dtype=torch.bfloat16, device="meta")
    assert "at most 67108736 keys (M + L), got 67108737" in str(
        cuda.why_not_call(call._replace(k_mem=keys, v_mem=keys))
    )
    assert cuda.why_not_call(call._replace(k_mem=keys[:, :, 1:], v_mem=keys[:, :, 1:])) is None
    texts = torch.empty(65536, 1, 20, 8, dtype=torch.bfloat16, device="meta")
    assert "at most 65535 batch rows (B), got 65536" in str(cuda.why_not_call(call._replace(q=texts, k=texts, v=texts)))


def test_a_raw_operators_gradients_are_refused_where_there_are_none(
    emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode runs on any GPU."""
    use(monkeypatch, emulated, capability=(8, 0))
    call = as_fields(make_inputs(Case(L=4, D=8), torch.bfloat16))
    out, _ = torch.ops.txl_kernels.rel_attention(*call, "cuda")
    with pytest.raises(RuntimeError, match=r"cannot compute gradients: .* capability 9\.0, this is 8\.0"):
        out.sum().backward()


@pytest.mark.usefixtures("kernels")
def test_gradients_that_come_as_one_row() -> None:
    """A mean's gradient has strides of 0."""
    inputs = make_inputs(Case(L=70, D=64), torch.bfloat16)
    out = rel_attention(**as_call(inputs), backend="cuda")
    leaves = [inputs[name] for name in TENSORS]
    dout = torch.full_like(out[:, :, :1], 0.25).expand_as(out)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for one, other in zip(got, torch.autograd.grad(out, leaves, dout.contiguous()), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [(100, 30), (20, 70), (448, 448)], ids=str)
def test_no_tile_without_a_visible_pair_is_visited(
    window: tuple[int, int], emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the products of a window to both sides: forward and dq by 64 x 64 tiles, dk and dv by 64
    queries and the 128 keys of a block."""
    use(monkeypatch, emulated, multiprocessors=1)
    counter = ctypes.CDLL(emulated.__file__).txl_products
    counter.restype = ctypes.c_int64
    blocks = 7
    length = 64 * blocks
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((apart <= window[0]) & (apart >= -window[1])).view(blocks, 64, length).any(1)
    tiles = int(seen.view(blocks, -1, 64).any(2).sum())
    wide = sum(int(seen[:, first : first + 128].any(1).sum()) for first in range(0, length, 128))
    inputs = make_inputs(Case(B=1, H=1, L=length, M=0, D=64, causal=False, window=window), torch.bfloat16)
    start = counter()
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="cuda")
    middle = counter()
    gradients(out, lse, inputs)
    assert middle - start == 3 * tiles + 2 * blocks
    assert counter() - middle == 6 * tiles + 2 * 5 * wide + 4 * blocks


@pytest.mark.parametrize("name", ["q", "k", "r", "content_bias", "position_bias"])
def test_what_was_chosen_is_remembered_by_alignment_and_gradients(
    name: str, emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that begins between two words has the same signature."""
    use(monkeypatch, emulated)
    asked = []
    why_not_call = cuda.why_not_call
    monkeypatch.setattr(cuda, "why_not_call", lambda call: asked.append(call) or why_not_call(call))
    inputs = as_call(make_inputs(Case(L=20, D=8, H=1), torch.bfloat16))

    def run(**other: torch.Tensor) -> int:
        rel_attention(**inputs | other, backend="cuda")
        return len(asked)

    with torch.no_grad():
        before = run()
        assert run() == before
        x = inputs[name]
        moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        with pytest.raises(RuntimeError, match=f"rows of {name} apart, at multiples of 16 bytes"):
            run(**{name: moved})
        before = run()
    assert run() > before  # gradients are wanted
    before = run()
    assert run() == before
