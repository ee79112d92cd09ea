"""Units that multiply bfloat16 in pairs: their values, alone and beside their emulation, and the
registers that they share with torch."""

from collections.abc import Iterator

import pytest
import torch
from cases import BIAS_ALONE, CASES, NO_BIASES, TERMS, Case, as_call, make_inputs
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import gradients, matches_the_reference
from tolerances import OF_ROUNDING, largest

from txl_kernels import rel_attention
from txl_kernels.backends import cpu

EMULATED = {"avx512_bf16": "emulated_bf16", "amx": "emulated_amx"}
UNITS = [*EMULATED, *EMULATED.values()]


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    cpu.native.module.force_isa("")


def use(isa: str) -> None:
    if isa not in ["", *cpu.native.module.isas(True)]:
        emulated = isa.startswith("emulated")
        pytest.skip("built without TXL_KERNELS_EMULATED=on" if emulated else f"this processor has no {isa}")
    cpu.native.module.force_isa(isa)


def run(case: Case, isa: str) -> list[torch.Tensor]:
    use(isa)
    inputs = make_inputs(case, torch.bfloat16)
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend="native")
    return [out, lse, *gradients(out, lse, inputs).values()]


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_eager(case: Case, isa: str) -> None:
    use(isa)
    require_at_most_twice_eager(case, torch.bfloat16, "native")


@pytest.mark.parametrize("isa", UNITS)
@pytest.mark.parametrize("case", CASES + TERMS, ids=str)
def test_bfloat16_matches_the_reference(case: Case, isa: str) -> None:
    use(isa)
    matches_the_reference(case, torch.bfloat16, "native", minimum=0.0)


@pytest.mark.parametrize("isa", EMULATED)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, H=2, L=150, M=333, D=64, intervals="random", dropout_p=0.1),
        Case(B=1, H=2, L=33, M=70, D=41, causal=False),
    ],
    ids=["masks and dropout", "narrow"],
)
def test_unit_equals_its_emulation(isa: str, case: Case) -> None:
    """The same roundings to bfloat16; another order of sums, which may turn one."""
    for got, want in zip(run(case, isa), run(case, EMULATED[isa]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=OF_ROUNDING[got.dtype] * largest(want))


@pytest.mark.parametrize("isa", ["", *UNITS])
def test_gradients_of_queries_outside_the_table_are_zero(isa: str) -> None:
    """The table ends within a unit's depth of what queries 0 to 95 see: their position queries have
    zero gradients, also where another query holds NaN."""
    use(isa)
    shape = {"B": 1, "H": 1, "L": 192, "M": 400, "D": 16, "Dp": 16, "causal": False}
    inputs = make_inputs(Case(**shape, T=301, zero_row=0, outside="zero", **NO_BIASES), torch.bfloat16)
    inputs["end"] = torch.where(torch.arange(192) < 96, 100, 288).int()[None]
    with torch.no_grad():
        inputs["q"][0, 0, 99] = torch.nan
    out = rel_attention(**as_call(inputs), backend="native")
    out[:, :, :96].sum().backward()
    assert not inputs["q_pos"].grad[0, 0, :96].any()
    assert inputs["q"].grad[0, 0, :96].isfinite().all()


def test_distances_outside_the_table_cost_no_products() -> None:
    """Tiles of keys whose distances all lie outside the table multiply as often as plain attention
    does, whose only positional term is a bias: forward and backward, for shared and own tables."""
    length, width = 600, 64
    shape = {"name": "", "B": 1, "H": 2, "Hkv": 1, "L": length, "M": 0, "D": width, "outside": "zero"}

    def multiplications(case: Case) -> int:
        use("emulated_bf16")
        before = cpu.native.module.emulated_multiplications()
        run(case, "emulated_bf16")
        return int(cpu.native.module.emulated_multiplications()) - before

    plain = multiplications(Case(**shape, **BIAS_ALONE, T=1, zero_row=0))
    outside = multiplications(Case(**shape, Dp=16, T=1, zero_row=10**6))
    assert outside == plain > 0
    inside = multiplications(Case(**shape, Dp=16, T=length, zero_row=0)) - plain
    partly = multiplications(Case(**shape, Dp=16, T=40, zero_row=0)) - plain
    pairs, pairs_partly = length * (length + 1) / 2, 40 * length
    assert 0 < partly / inside < 3 * pairs_partly / pairs  # 13% of the pairs, in whole tiles


@pytest.mark.parametrize("isa", UNITS)
def test_float32_takes_the_vector_kernels(isa: str) -> None:
    """A unit changes bfloat16 alone."""
    inputs = make_inputs(Case(L=70, M=90, D=24), torch.float32)
    results = []
    for name in (isa, "baseline" if isa.startswith("emulated") else "avx512"):
        use(name)
        results.append(rel_attention(**as_call(inputs), backend="native"))
    assert torch.equal(*results)


def test_tile_registers_are_restored() -> None:
    """Torch's products in bfloat16 use them, too, on the same threads."""
    a, b = (torch.randn(300, 300).bfloat16() for _ in range(2))
    want = a @ b
    case = Case(B=2, H=2, L=70, M=64, D=64)
    first = run(case, "")
    for _ in range(3):
        torch.testing.assert_close(run(case, ""), first, rtol=0, atol=0)
        assert torch.equal(a @ b, want)
