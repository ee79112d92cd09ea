"""The Hopper kernels against float64: their source run by the emulation, and on a GPU."""

import ctypes
import re
from typing import Any

import pytest
import torch
from cases import NO_BIASES, TENSORS, Case, as_call, as_fields, leaves, make_inputs
from cuda_cases import HOPPER, HOPPER_INKLING, SPLIT, UP_TO_SIXTEEN, inkling, use, within_the_error_budget
from cuda_emulation import build, plan_of
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import gradients, ignores_what_no_query_sees, matches_the_reference

from txl_kernels import rel_attention
from txl_kernels.backends import cuda, reference, route
from txl_kernels.backends.limits import PREFILL
from txl_kernels.backends.protocol import architecture
from txl_kernels.backends.self_check import Kind, compare, kind_of

pytestmark = pytest.mark.slow  # compiling the emulation takes a minute and a half of processor time
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "emulated":
        use(monkeypatch, build(), multiprocessors=1)
    elif architecture(torch.device("cuda")) != PREFILL.capability:
        pytest.skip("needs a GPU of compute capability 9.0")


def run(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse."""
    return rel_attention(**as_call(inputs), return_lse=True, backend="cuda")


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(
    ("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(HOPPER + HOPPER_INKLING)], ids=str
)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    within_the_error_budget(case, dtype)


# Rows of positions and of values that are narrower than the kernels'.
NARROW = [
    Case("Zipformer", B=2, L=70, M=0, D=32, Dp=4, Dv=12, causal=False, r="1 T Dp", position_scale=1.0, **NO_BIASES),
    Case("Zipformer, padding", B=2, L=40, M=0, D=32, Dp=4, Dv=12, causal=False, intervals="filled", **NO_BIASES),
    Case("a short call of odd widths", B=1, L=3, M=90, D=40, Dp=3, Dv=7, **NO_BIASES),
    Case("narrow positions", B=1, H=4, Hkv=2, L=60, M=70, D=128, Dp=12, sink="H", outside="zero", **NO_BIASES),
    Case("narrow values", B=1, L=60, M=70, D=64, Dp=8, Dv=40, dropout_p=0.3, **NO_BIASES),
]


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(NARROW)], ids=str)
def test_narrow_rows(case: Case, dtype: torch.dtype) -> None:
    within_the_error_budget(case, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in SHAPES if case.D % 8 == 0], ids=str)
def test_at_most_twice_the_error_of_eager(case: Case, dtype: torch.dtype) -> None:
    require_at_most_twice_eager(case, dtype, "cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("terms", ["paper", "Inkling"])
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_r_in_a_fixed_order(width: int, terms: str) -> None:
    """The same bits in two runs, and the values of any order."""
    results = []
    for fixed in (True, True, False):
        torch.use_deterministic_algorithms(fixed)
        try:
            case = HOPPER_INKLING[0].but(B=1, D=width) if terms == "Inkling" else Case(B=1, L=150, M=40, D=width)
            inputs = make_inputs(case, torch.bfloat16)
            results.append(gradients(*run(inputs), inputs))
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], results[2], rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(40, DTYPES[1]), (64, DTYPES[0]), (128, DTYPES[1])], ids=str)
def test_self_check_of_the_first_call(dtype: torch.dtype, width: int, decode: bool) -> None:
    """Every gradient is within a few percent of its norm, also sums that cancel (the biases')."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert compare(cuda, Kind("cuda", device, dtype, width, decode, True)) is None
    terms = {"terms": ("r", "q_pos", "sink"), "position_width": 16, "options": ("zero_outside",), "grouped": True}
    for backward in (False, True):
        assert compare(cuda, Kind("cuda", device, dtype, width, decode, backward, **terms)) is None


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_keys_are_split_where_there_are_few_programs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    results, parts = [], []
    for multiprocessors in (1, 8, 132):
        use(monkeypatch, build(), multiprocessors)
        plan = plan_of(1, 1, case.L, case.M, 64, torch.bfloat16, module=build(), multiprocessors=multiprocessors)
        parts.append((plan.parts, plan.backward_parts))
        inputs = make_inputs(case, torch.bfloat16)
        out, lse = run(inputs)
        results.append({"out": out, "lse": lse} | gradients(out, lse, inputs))
    assert parts[0] == (1, 1) < min(parts[1:])
    assert all(forward > 1 and backward > 1 for forward, backward in parts[1:])
    for found in results[1:]:
        for name, x in found.items():
            rtol, atol = {"out": (2e-2, 2e-3), "lse": (0, 1e-4)}.get(name, (2e-2, 2e-2))
            torch.testing.assert_close(x, results[0][name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    matches_the_reference(case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("case", UP_TO_SIXTEEN, ids=str)
@torch.no_grad()
def test_up_to_sixteen_queries_without_gradients(case: Case) -> None:
    call = as_fields(make_inputs(case, torch.bfloat16))
    assert not route.is_decode(call)
    assert not kind_of("cuda", call).decode
    matches_the_reference(case, torch.bfloat16, "cuda")


def test_decode_takes_what_the_hopper_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, build())
    call = as_fields(make_inputs(Case(L=3, D=8), torch.bfloat16))
    x = call.k
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    wide = as_fields(make_inputs(Case(L=3, D=136), torch.bfloat16))
    one = as_fields(make_inputs(Case(L=1, D=8), torch.bfloat16))
    exact = as_fields(make_inputs(Case(L=3, D=8), torch.float32))
    assert not route.is_decode(call)
    for other in (call._replace(k=unaligned), wide, one, exact):
        assert route.is_decode(other)
        assert kind_of("cuda", other).decode
        out, _ = cuda.forward(other)
        want, _ = reference.forward(other)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


def test_parts_fill_the_rounds_of_blocks() -> None:
    """By the rule of num_splits_heuristic in FA2's flash_api.cpp, for blocks of 128 queries."""
    for heads, memory, parts in ((1, 4000, 13), (66, 4000, 2), (67, 4000, 5), (80, 8000, 3), (106, 4000, 1)):
        assert plan_of(1, heads, 64, memory, 64, torch.bfloat16, module=build()).parts == parts


@pytest.mark.usefixtures("kernels", "the_same_bits")
@pytest.mark.parametrize("start", [None, 151])
@pytest.mark.parametrize("width", [0, 16])
def test_rows_that_no_query_sees_may_hold_nan(start: int | None, width: int) -> None:
    bounds = {} if start is None else {"start": torch.full((1, 1), start, dtype=torch.int32)}
    biases = NO_BIASES if width else {}
    case = Case(L=80, M=200, D=64, B=1, window=50, extra_rows=40, Dp=width, **biases)
    ignores_what_no_query_sees(case, torch.bfloat16, "cuda", bounds)


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize("width", [64, 128])
def test_nan_of_queries_that_see_nothing_is_ignored(width: int) -> None:
    inputs = make_inputs(Case(L=150, M=40, D=width, B=1, intervals="alternate"), torch.bfloat16)
    with torch.no_grad():
        inputs["q"][:, :, ::2] = torch.nan
    out, lse = run(inputs)
    assert out.isfinite().all()
    cotangents = torch.ones_like(out), torch.ones_like(lse)
    for x in cotangents:
        x[:, :, ::2] = torch.nan
    found = torch.autograd.grad((out, lse), list(leaves(inputs).values()), cotangents)
    for name, gradient in zip(leaves(inputs), found, strict=True):
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [-(2.0**15), 2.0**20, -(2.0**30), 2.0**100])
def test_gradients_of_too_large_scores_are_nan(size: float) -> None:
    """Those of other scores are right to a percent; results are right for all."""
    inputs = make_inputs(Case(L=20, M=50, B=1, D=64, causal=False, scale=1.0), torch.bfloat16)
    with torch.no_grad():
        for name in ("q", "k", "k_mem", "r", "content_bias", "position_bias"):
            inputs[name].zero_()
        inputs["q"][..., 0] = 1
        for name in ("k", "k_mem"):
            inputs[name][..., 0] = size
    out, _ = run(inputs)
    mean = torch.cat([inputs["v_mem"], inputs["v"]], 2).float().mean(2, keepdim=True)
    torch.testing.assert_close(out.float(), mean.expand(out.shape), rtol=0, atol=5e-3)
    dv, dk = torch.autograd.grad(out.sum(), [inputs["v"], inputs["k"]])
    if abs(size) > 45_000:
        assert dv.isnan().all()
        assert dk.isnan().all()
    else:
        torch.testing.assert_close(dv.float(), torch.full(dv.shape, 20 / 70), rtol=2e-2, atol=0)


@pytest.mark.usefixtures("kernels")
def test_bounds_out_of_range_give_nan_to_their_query_alone() -> None:
    inputs = make_inputs(Case(L=100, M=40, D=64, B=1, H=1), torch.bfloat16)
    inputs["start"] = torch.zeros(1, 100, dtype=torch.int32)
    inputs["start"][:, 30] = 1000
    out, lse = run(inputs)
    bad = out.isnan()
    assert bad[:, :, 30].all()
    assert bad.sum() == 64
    for name, gradient in gradients(out, lse, inputs).items():
        assert gradient.isfinite().all(), name


@pytest.mark.usefixtures("kernels")
def test_only_needed_gradients() -> None:
    case = Case(L=70, M=40, D=64, B=1, H=1)
    whole = make_inputs(case, torch.bfloat16)
    wanted = torch.autograd.grad(run(whole)[0].sum(), [whole[name] for name in TENSORS])
    for name, want in zip(TENSORS, wanted, strict=True):
        x = make_inputs(case, torch.bfloat16)
        for other in TENSORS:
            x[other].requires_grad_(other == name)
        (got,) = torch.autograd.grad(run(x)[0].sum(), [x[name]])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_refused_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
        rel_attention(**as_call(make_inputs(case, dtype)), backend="cuda")

    use(monkeypatch, build(), capability=(8, 0))
    with pytest.raises(RuntimeError, match=r"this is 8\.0, as the kernels do that compute gradients"):
        call(Case(L=2))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"this is 8\.0, as the kernels do that compute 17 queries"):
        call(Case(L=17, D=8))
    use(monkeypatch, build())
    with pytest.raises(RuntimeError, match="bfloat16 or float16, not float32"):
        call(Case(D=8), torch.float32)
    with pytest.raises(RuntimeError, match=r"head width .* of at most 128, not 136"):
        call(Case(D=136))
    inputs = make_inputs(Case(L=20, D=16), torch.bfloat16)
    memory = inputs["k_mem"]
    overlapping = memory.new_zeros(8 * memory.size(2) + 8).as_strided(memory.shape, (0, 0, 8, 1))
    for rows in (memory[:, :, :1].expand_as(memory), overlapping):
        with pytest.raises(RuntimeError, match=r"rows of k_mem apart, .* not strides"):
            run(inputs | {"k_mem": rows})
    with pytest.raises(RuntimeError, match="rows of q apart, at multiples of 16 bytes"):
        call(Case(L=20, D=8, layout="fused"))


def test_sizes_beyond_a_grid_or_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, build())
    call = as_fields(make_inputs(Case(L=20, D=8, B=1, H=1), torch.bfloat16))
    keys = torch.empty(1, 1, PREFILL.keys - 19, 8, dtype=torch.bfloat16, device="meta")
    why_not = str(route.why_not_call("cuda", call._replace(k_mem=keys, v_mem=keys)))
    assert "at most 67108736 keys (M + L), got 67108737" in why_not
    assert route.why_not_call("cuda", call._replace(k_mem=keys[:, :, 1:], v_mem=keys[:, :, 1:])) is None
    rows = torch.empty(65536, 1, 20, 8, dtype=torch.bfloat16, device="meta")
    why_not = str(route.why_not_call("cuda", call._replace(q=rows, k=rows, v=rows)))
    assert "at most 65535 batch rows (B), got 65536" in why_not


def test_gradients_of_the_operator_are_refused_beside_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward ran on the decode kernels, which take them."""
    use(monkeypatch, build())
    call = as_fields(make_inputs(inkling("", 3, 3, 9, sink=None, r="H T Dp"), torch.bfloat16))
    biases = {name: torch.ones(6, n, dtype=torch.bfloat16) for name, n in (("content_bias", 24), ("position_bias", 16))}
    out, _ = torch.ops.txl_kernels.rel_attention(*call._replace(**biases), "cuda")
    with pytest.raises(
        RuntimeError, match="cannot compute gradients: the kernels do not take content_bias beside q_pos"
    ):
        out.sum().backward()


def test_gradients_of_the_operator_are_refused_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, build(), capability=(8, 0))
    call = as_fields(make_inputs(Case(L=4, D=8), torch.bfloat16))
    out, _ = torch.ops.txl_kernels.rel_attention(*call, "cuda")
    with pytest.raises(RuntimeError, match=r"cannot compute gradients: .* capability 9\.0, this is 8\.0"):
        out.sum().backward()


@pytest.mark.usefixtures("kernels")
def test_expanded_output_gradient() -> None:
    inputs = make_inputs(Case(L=70, D=64), torch.bfloat16)
    out, tensors = run(inputs)[0], list(leaves(inputs).values())
    dout = torch.full_like(out[:, :, :1], 0.25).expand_as(out)
    found = [torch.autograd.grad(out, tensors, x, retain_graph=True) for x in (dout, dout.contiguous())]
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_layers_in_turns_encode_each_tensor_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a plan. Their results are the same bits again, and those of new addresses, too."""
    use(monkeypatch, build(), multiprocessors=1)
    encodings = ctypes.CDLL(build().__file__).txl_encodings
    encodings.restype = ctypes.c_int64
    layers = [make_inputs(Case(B=1, H=2, L=70, M=40, D=64, seed=n), torch.bfloat16) for n in range(3)]
    moved = [{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in layer.items()} for layer in layers]
    with torch.no_grad():
        first = [run(layer) for layer in layers]
        before = encodings()
        again = [run(layer) for _ in range(2) for layer in layers]
        assert encodings() == before
        again += [run(layer) for layer in moved]
        assert before < encodings() <= before + 5 * len(layers)  # k, v, k_mem, v_mem, r
    for n, results in enumerate(again):
        torch.testing.assert_close(results, first[n % 3], rtol=0, atol=0)


@pytest.mark.parametrize("window", [(100, 30), (20, 70), (448, 448)], ids=str)
def test_no_tile_without_a_visible_pair_is_visited(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of products for a window to both sides: forward and dq of 64 x 64 tiles, dk and dv
    of 64 queries and the 128 keys of a block; at the first step also dq and dr of zeros."""
    use(monkeypatch, build(), multiprocessors=1)
    counter = ctypes.CDLL(build().__file__).txl_products
    counter.restype = ctypes.c_int64
    blocks = 7
    length = 64 * blocks
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((apart <= window[0]) & (apart >= -window[1])).view(blocks, 64, length).any(1)
    tiles = int(seen.view(blocks, -1, 64).any(2).sum())
    wide = sum(int(seen[:, first : first + 128].any(1).sum()) for first in range(0, length, 128))
    inputs = make_inputs(Case(B=1, H=1, L=length, M=0, D=64, causal=False, window=window), torch.bfloat16)
    start = counter()
    out, lse = run(inputs)
    middle = counter()
    gradients(out, lse, inputs)
    assert middle - start == 3 * tiles + 2 * blocks
    assert counter() - middle == 6 * tiles + 2 * 5 * wide + 6 * blocks


def test_no_tile_outside_of_the_table_forms_a_product_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 64 x 64 tiles, for 3 tiles of queries and 6 of keys. Rows for the distances -63
    to 0 serve a tile of queries with its own keys and with those of the tile after. The tile before
    is used, too, because the product that brings distance 0 begins there."""
    use(monkeypatch, build(), multiprocessors=1)
    counter = ctypes.CDLL(build().__file__).txl_products
    counter.restype = ctypes.c_int64
    case = Case(B=1, H=1, L=192, M=192, D=64, Dp=16, causal=False, outside="zero", **NO_BIASES)

    def products(rows: int, zero_row: int) -> tuple[int, int]:
        inputs = make_inputs(case.but(T=rows, zero_row=zero_row), torch.bfloat16)
        start = counter()
        out, lse = run(inputs)
        middle = counter()
        gradients(out, lse, inputs)
        return middle - start, counter() - middle

    pairs, near = 3 * 6, (3, 3, 2)  # by tile of queries
    assert products(1, 10_000) == (2 * pairs, 3 * pairs + 4 * pairs)
    of_positions = sum(n + 2 for n in near)  # the first two bring the first tile's scores
    of_dq_and_dr = sum(2 * (n + 2) for n in near)  # those of the first step are of zeros
    assert products(64, 63) == (2 * pairs + of_positions, 7 * pairs + of_positions + of_dq_and_dr + sum(near))


def test_split_of_inklings_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, build())
    case = SPLIT[-1]
    call = as_fields(make_inputs(case, torch.bfloat16))._replace(content_bias=None, position_bias=None)
    plan = cuda.prefill_plan(call, call.q, 132)
    assert (plan.parts, plan.backward_parts) == (4, 4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [0, 16])
def test_table_without_rows(width: int) -> None:
    """No query sees a key, so no row is needed."""
    biases = NO_BIASES if width else {}
    inputs = make_inputs(Case(B=1, L=70, M=90, D=64, Dp=width, intervals="nothing", **biases), torch.bfloat16)
    inputs["r"] = inputs["r"].detach()[:, :0].requires_grad_()
    out, lse = run(inputs)
    assert not out.any()
    for name, gradient in gradients(out, lse, inputs).items():
        assert not gradient.any(), name


def test_refused_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, build())
    few, many = inkling("", 3, 3, 9), inkling("", 3, 20, 9)
    for case, message in (
        (Case(L=3, H=2, Hkv=1), "gradients with grouped heads, got 1 heads of k for 2 of q, without q_pos"),
        (Case(L=20, T=4, outside="zero"), "outside='zero', without q_pos"),
        (Case(L=20, sink="H"), "sink, got [2, 2, 20], without q_pos"),
        (few.but(Dp=24), "gradients with q_pos wider (Dp) than 16, got 24"),
        (many.but(Dp=24), "q_pos wider (Dp) than 16, got 24"),
        (many.but(content_bias="H D"), "content_bias beside q_pos"),
        (many.but(r_bias="H T"), "r_bias"),
        (many.but(softcap=2.0), "softcap, got 2.0"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"does not take {message}; backend='triton' does")):
            rel_attention(**as_call(make_inputs(case, torch.bfloat16)), backend="cuda")
    use(monkeypatch, build(), capability=(8, 0))
    message = "this is 8.0, as the kernels do that compute q_pos, got [2, 6, 5, 16], for more than 4 queries (L), got 5"
    with torch.no_grad(), pytest.raises(RuntimeError, match=re.escape(message)):
        rel_attention(**as_call(make_inputs(few.but(L=5), torch.bfloat16)), backend="cuda")


@pytest.mark.parametrize("name", ["q", "k", "r", "content_bias", "position_bias"])
def test_choice_is_cached_by_alignment_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unaligned view has the same signature."""
    use(monkeypatch, build())
    checked = []
    why_not_call = route.why_not_call
    monkeypatch.setattr(route, "why_not_call", lambda name, call: checked.append(call) or why_not_call(name, call))
    inputs = as_call(make_inputs(Case(L=20, D=8, H=1), torch.bfloat16))

    def checks(**other: torch.Tensor) -> int:
        rel_attention(**inputs | other, backend="cuda")
        return len(checked)

    with torch.no_grad():
        before = checks()
        assert checks() == before
        x = inputs[name]
        moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
        with pytest.raises(RuntimeError, match=f"rows of {name} apart, at multiples of 16 bytes"):
            checks(**{name: moved})
        before = checks()
    assert checks() > before  # with gradients
    before = checks()
    assert checks() == before
