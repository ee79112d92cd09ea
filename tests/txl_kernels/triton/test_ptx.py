"""Triton's PTX of the kernels for sm_80 and sm_90, executed by tools/ptx: values and gradients
against float64, races, bounds, missing waits for copies and products. No GPU is needed."""

import pytest
import torch
from cases import BIAS_ALONE, Case
from oracle import matches_the_reference
from ptx_marks import RUNS_TRITONS_PTX

pytestmark = RUNS_TRITONS_PTX
# Several options each: compiling takes longer than running.
CASES = {
    torch.bfloat16: [
        Case("two tiles and a bit", B=1, H=2, L=70, M=60, D=64),
        Case("bounds and dropout", B=2, H=1, L=70, M=50, D=80, intervals="random", dropout_p=0.3),
        Case("wide heads", B=1, H=1, L=70, M=70, D=128),
        Case("bidirectional", B=1, H=2, L=66, M=70, D=64, causal=False, layout="lbhd", scale=-0.1, extra_rows=3),
        Case("one query", B=2, H=1, L=1, M=9, D=64, dropout_p=0.2),
        Case("bias alone, wide values, softcap", B=1, H=2, L=70, M=60, D=64, Dv=128, **BIAS_ALONE, softcap=3.0),
        Case("Inkling", B=1, H=2, Hkv=1, L=70, M=160, D=64, Dp=16, r="1 T Dp", T=40, zero_row=0, outside="zero",
             sink="B H L", position_scale=1.0, scale=1 / 64),
        Case("bias alone, distances outside", B=1, H=2, Hkv=1, L=70, M=60, D=64, **BIAS_ALONE, T=40, zero_row=9,
             outside="zero", position_scale=0.5, softcap=3.0, dropout_p=0.2),
    ],
    torch.float16: [
        Case("decode, split keys", B=1, H=2, L=3, M=300, D=128, layout="fused"),
        Case("unaligned rows", B=1, H=1, L=40, M=90, D=41, causal=False, window=60),
        Case("bias beside r, narrow values, softcap, bounds", B=2, H=1, L=66, M=70, D=64, Dv=40, r_bias="H T",
             softcap=2.0, causal=False, intervals="random"),
        Case("position queries, bias beside r, bidirectional", B=1, H=2, L=66, M=70, D=64, Dp=8, r_bias="H T",
             causal=False, position_scale=-0.4, T=60, zero_row=20, outside="zero", intervals="random"),
    ],
    torch.float32: [Case("episodes", B=1, H=1, L=40, M=40, D=64, intervals="episodes")],
}  # fmt: skip


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("dtype", "case"), [(d, case) for d, found in CASES.items() for case in found], ids=str)
@pytest.mark.usefixtures("nan_filled")
def test_values_and_gradients(case: Case, dtype: torch.dtype, architecture: int) -> None:
    from ptx.triton_launch import executed

    with executed(architecture):
        matches_the_reference(case, dtype, "triton")


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, H=1, L=70, M=20, D=64),
        Case("bounds", B=2, H=1, L=70, M=20, D=80, intervals="random", dropout_p=0.3, causal=False),
        Case("bias alone", B=2, H=1, L=70, M=20, D=64, **BIAS_ALONE, softcap=3.0),
        Case("bias beside r", B=2, H=1, L=70, M=20, D=64, r_bias="H T", causal=False),
        Case("Inkling", B=2, H=2, Hkv=1, L=70, M=20, D=64, Dp=16, T=40, zero_row=0, outside="zero", sink="H"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nan_filled")
def test_gradient_of_the_table_without_atomics(case: Case, architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptx.triton_launch import executed

    monkeypatch.setenv("TXL_KERNELS_ATOMICS", "0")
    with executed(architecture):
        matches_the_reference(case, torch.bfloat16, "triton")


# Calls with kernels in which LLVM fills unused lanes from a register that is never written: Triton
# 3.7 for sm_8x and sm_120, Triton 3.8 and 3.9 for sm_100 and sm_120.
FILLED = [
    "bf16 D64", "bf16 D128", "bf16 D40", "bf16 D64 bounds dropout", "bf16 D64 r_bias softcap values 128",
]  # fmt: skip


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("architecture", [80, 89, 100, 120])
def test_registers_that_are_never_written_are_not_used(architecture: int, name: str) -> None:
    """Also for architectures that tools/ptx does not execute."""
    from machine_code import VARIANTS, compile_call
    from ptx.demand import demanded, registers
    from ptx.parse import Address, parse

    from txl_kernels.backends.triton import config, plan

    if refusal := config.why_not_capability(divmod(architecture, 10), plan.TRITON_VERSION):
        pytest.skip(refusal)
    kernels = compile_call(next(x for x in VARIANTS if str(x.case) == name), architecture)
    for kernel in ("backward_queries", "backward_keys"):
        program = parse(kernels[kernel].kernel.asm["ptx"])
        results = [x.operands[0] for x in program.code if x.operands and not isinstance(x.operands[0], Address)]
        written = {r.slot for operand in results for r in registers(operand)}
        unset = [r for r in program.registers if r.slot not in written]
        print(f"{kernel}, never written:", [r.name for r in unset])
        used = demanded(program)
        assert not [r.name for r in unset if used[r.slot]]
