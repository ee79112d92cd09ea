"""The Hopper kernels against the float64 definition: their own source run by the emulation, and on
a GPU."""

from typing import Any

import pytest
import torch
from against_reference import matches_the_reference
from cuda_cases import HOPPER, forward, use, within_the_error_budget
from cuda_emulation import build, plan_of
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import Case, as_call, gradients, make_inputs

from txl_kernels import rel_attention
from txl_kernels.backends import cuda

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(tmp_path_factory.mktemp("hopper"))


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "emulated":
        use(monkeypatch, request.getfixturevalue("emulated"), multiprocessors=1)
    elif torch.cuda.get_device_capability() != cuda.HOPPER:
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(HOPPER)], ids=str)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "cuda")
    within_the_error_budget(case, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in SHAPES if case.D % 8 == 0], ids=str)
def test_at_most_twice_the_error_of_eager(case: Case, dtype: torch.dtype) -> None:
    require_at_most_twice_eager(case, dtype, "cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_r_in_a_fixed_order(width: int) -> None:
    """Against the same in any order; the same bits in two runs."""
    case = Case("", B=2, H=2, L=150, M=40, D=width)

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


def test_keys_are_split_where_there_are_few_programs(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("", L=70, M=900, D=64, B=1, H=1)
    results = []
    for multiprocessors, parts in ((1, 1), (8, 4), (132, 4)):
        use(monkeypatch, emulated, multiprocessors)
        plan = plan_of(1, 1, 70, 900, 64, torch.bfloat16, module=emulated, multiprocessors=multiprocessors)
        assert plan.parts == parts
        results.append(forward(case, torch.bfloat16))
    for out, lse in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse, results[0][1], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bounds", [False, True])
def test_rows_that_nobody_sees_may_hold_nan(bounds: bool) -> None:
    case = Case("", L=80, M=200, D=64, B=1)
    x = make_inputs(case, torch.bfloat16)
    with torch.no_grad():
        for name in ("k_mem", "v_mem"):
            x[name][:, :, :100] = torch.nan
        x["r"][:, 90:] = torch.nan
    call = as_call(x) | ({"start": torch.full((1, 1), 151, dtype=torch.int32)} if bounds else {}) | {"window": 50}
    if bounds:
        with torch.no_grad():
            for name in ("k_mem", "v_mem"):
                x[name][:, :, 100:150] = torch.nan
    out, lse = rel_attention(**call, return_lse=True, backend="cuda")
    assert out.isfinite().all()
    for name, gradient in gradients(out, lse, x).items():
        assert gradient.isfinite().all(), name


@pytest.mark.usefixtures("kernels")
def test_only_wanted_gradients() -> None:
    case = Case("", L=70, M=40, D=64, B=1)
    whole = make_inputs(case, torch.bfloat16)
    want = gradients(*rel_attention(**as_call(whole), return_lse=True, backend="cuda"), whole)
    for name in want:
        x = make_inputs(case, torch.bfloat16)
        for other in want:
            x[other].requires_grad_(other == name)
        out = rel_attention(**as_call(x), backend="cuda")
        (got,) = torch.autograd.grad(out.sum(), [x[name]])
        plain = rel_attention(**as_call(whole), backend="cuda")
        (same,) = torch.autograd.grad(plain.sum(), [whole[name]])
        torch.testing.assert_close(got, same, rtol=2e-2, atol=2e-2)


def test_what_it_does_not_take(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
        rel_attention(**as_call(make_inputs(case, dtype)), backend="cuda")

    use(monkeypatch, emulated, capability=(8, 0))
    with pytest.raises(
        RuntimeError, match=r"compute capability 9\.0, this is 8\.0, as the kernels do that compute gradients"
    ):
        call(Case("", L=2))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"this is 8\.0, as the kernels do that compute 17 queries"):
        call(Case("", L=17, D=8))
    use(monkeypatch, emulated)
    with pytest.raises(RuntimeError, match="bfloat16 or float16, not float32"):
        call(Case("", D=8), torch.float32)
    with pytest.raises(RuntimeError, match=r"head width .* of at most 128, not 136"):
        call(Case("", D=136))
    with pytest.raises(RuntimeError, match="rows of q that begin at multiples of 16 bytes"):
        call(Case("", L=20, D=8, layout="fused"))


@pytest.mark.usefixtures("kernels")
def test_tensors_that_do_not_begin_at_16_bytes() -> None:
    """Also after a call of the same shapes and strides."""
    inputs = as_call(make_inputs(Case("", L=20, D=8), torch.bfloat16))
    with torch.no_grad():
        rel_attention(**inputs, backend="cuda")
        k = inputs["k"]
        moved = torch.empty(k.numel() + 1, dtype=k.dtype, device=k.device)[1:].view(k.shape).copy_(k)
        with pytest.raises((RuntimeError, ValueError), match="multiples of 16 bytes"):
            rel_attention(**inputs | {"k": moved}, backend="cuda")
