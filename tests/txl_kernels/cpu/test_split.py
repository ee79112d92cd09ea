"""Float32 multiplied as sums of bfloat16 by AMX: as accurate as by vectors, and by fewer products
where `torch.set_float32_matmul_precision` allows that."""

import functools
from collections.abc import Iterator

import pytest
import torch
from error_budget import SHAPES
from oracle import CASES, MORE_TERMS, Case, as_call, gradients, make_inputs

from txl_kernels import rel_attention
from txl_kernels.backends import cpu

SPLITS = pytest.mark.parametrize("isa", ["amx_f32", "emulated_amx_f32"])
SHORT = Case("segment and memory", B=2, H=2, L=128, M=128, D=64, seed=1)
PRODUCTS = {"highest": 6, "high": 3, "medium": 1}


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    cpu.native.module.force_isa("")
    torch.set_float32_matmul_precision("highest")


def run(case: Case, isa: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    if isa not in cpu.native.module.isas(True):
        emulated = isa.startswith("emulated")
        pytest.skip("built without TXL_KERNELS_EMULATED=on" if emulated else f"this processor has no {isa}")
    cpu.native.module.force_isa(isa)
    inputs = make_inputs(case, dtype)
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="native")
    return {"out": out.detach(), "lse": lse.detach(), **gradients(out, lse, inputs)}


@functools.cache
def exact(case: Case) -> dict[str, torch.Tensor]:
    inputs = {
        n: x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x
        for n, x in make_inputs(case, torch.float32).items()
    }
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="reference")
    return {"out": out.detach(), "lse": lse.detach(), **gradients(out, lse, inputs)}


def errors(case: Case, got: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of each result the root of the mean square, beside that of the result itself."""
    want = exact(case)
    return {
        name: float((got[name].double() - x).square().mean().sqrt() / x.square().mean().sqrt())
        for name, x in want.items()
    }


@SPLITS
@pytest.mark.parametrize("case", CASES + MORE_TERMS, ids=str)
def test_the_contract(case: Case, isa: str) -> None:
    got = run(case, isa)
    for name, want in exact(case).items():
        if want is None:  # of what nobody uses
            assert got[name] is None or not got[name].any()
            continue
        seen = want.isfinite()
        assert torch.equal(got[name].isfinite(), seen)
        scale = float(want.abs().where(seen, 0.0).amax()) if want.numel() else 1.0
        torch.testing.assert_close(got[name][seen].double(), want[seen], rtol=0, atol=2e-6 * scale)


@SPLITS
@pytest.mark.parametrize("case", [s for s in SHAPES if s.L > 4], ids=str)
def test_six_products_are_as_accurate_as_vectors(case: Case, isa: str) -> None:
    split, plain = errors(case, run(case, isa)), errors(case, run(case, "baseline"))
    for name, error in split.items():
        assert error <= 1.5 * plain[name], f"{name}: {error:.2e}, by vectors {plain[name]:.2e}"


@SPLITS
def test_fewer_products_are_used_where_torch_is_told_so(isa: str) -> None:
    """Of two planes what is left out is 2^-15 of a product at most, of one 2^-7."""
    found = {}
    for precision in PRODUCTS:
        torch.set_float32_matmul_precision(precision)
        found[precision] = errors(SHORT, run(SHORT, isa))
    for name in exact(SHORT):
        assert 4 * found["highest"][name] < found["high"][name] < 2**-15, name
        assert 4 * found["high"][name] < found["medium"][name] < 2**-7, name


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch before 2.9")
def test_the_newer_way_to_tell_torch_counts_too() -> None:
    torch.set_float32_matmul_precision("high")
    wanted = run(SHORT, "emulated_amx_f32")["out"]
    torch.set_float32_matmul_precision("highest")
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert torch.equal(run(SHORT, "emulated_amx_f32")["out"], wanted)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


@SPLITS
def test_bfloat16_is_that_of_the_unit(isa: str) -> None:
    split, unit = (run(SHORT, name, torch.bfloat16) for name in (isa, isa.removesuffix("_f32")))
    for name, x in unit.items():
        assert torch.equal(split[name], x), name


def test_the_unit_computes_what_its_emulation_does() -> None:
    unit, emulation = run(SHORT, "amx_f32"), run(SHORT, "emulated_amx_f32")
    for name, x in emulation.items():
        torch.testing.assert_close(unit[name], x, rtol=0, atol=2e-6 * float(x.abs().max()))
