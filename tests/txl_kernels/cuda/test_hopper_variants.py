"""Instances of the Hopper kernels that no device has timed, which a macro chooses: nvcc's PTX,
executed as in test_hopper_ptx.py."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Case
from cuda_cases import HOPPER, HOPPER_INKLING, forward, use
from cuda_ptx import PtxModule, compiled_ptx, ptx_module
from oracle import matches_the_reference
from planted_faults import LONG, MANY, NOTHING, PARTS, POSITIONS, VARIANTS, WIDE, WIDE_LONG, Hopper, detects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
ALL, EARLY = "TXL_SECOND_GENERATION", "TXL_EARLY_START"  # the first stands for all macros
SHORT = [case for case in HOPPER if case.D > 64 or case.name.startswith("blocks")]
INKLING = [case for case in HOPPER_INKLING if case.name.startswith(("a table", "nothing"))]
CASES = [(ALL, case) for case in [*SHORT, *INKLING, WIDE_LONG, MANY, NOTHING, POSITIONS]]
CASES += [
    (macro, case) for macro in ("TXL_SHORT_EDGES", "TXL_ORDERED_EXPONENTIALS") for case in (LONG, WIDE, POSITIONS)
]
DTYPES = (torch.float16, torch.bfloat16)


def module_of(macro: str) -> PtxModule:
    module = ptx_module(macro)
    module.early = ("backward_keys", "finish", "early_merge") if macro in (EARLY, ALL) else ()
    return module


@pytest.fixture
def kernels(macro: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxModule]:
    module = module_of(macro)
    module.use(compiled_ptx("sm_90a", macro))
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    yield module
    faults, module.faults = module.faults, []
    assert not faults, faults


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(
    ("macro", "case", "dtype"), [(macro, case, DTYPES[n % 2]) for n, (macro, case) in enumerate(CASES)], ids=str
)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "cuda")


@pytest.mark.parametrize("macro", [ALL])
@pytest.mark.parametrize("case", [WIDE, MANY], ids=str)
@pytest.mark.parametrize("first", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 2, 0), (2, 0, 3, 1)], ids=str)
def test_warpgroups_in_any_order(first: tuple[int, ...], case: Case, kernels: PtxModule) -> None:
    kernels.first = first if case.D == 64 else tuple(g for g in first if g < 3)
    matches_the_reference(case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("macro", [ALL])
def test_split_keys(kernels: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, kernels, multiprocessors=132)
    matches_the_reference(Case("memory", L=70, M=600, D=128, B=1, H=1), torch.bfloat16, "cuda")


@pytest.mark.parametrize("macro", [ALL])
def test_items_of_several_blocks_and_parts(kernels: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of parts of keys; the last of five blocks has fewer items than the others."""
    use(monkeypatch, kernels, multiprocessors=1)
    whole = forward(PARTS, torch.bfloat16)
    use(monkeypatch, kernels, multiprocessors=5)
    for got, want in zip(forward(PARTS, torch.bfloat16), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("kernels", "the_same_bits")
@pytest.mark.parametrize("macro", [ALL])
def test_gradients_with_the_same_bits() -> None:
    """dr is summed in a table for each block of a launch."""
    matches_the_reference(Case("two rows", L=130, M=70, D=128, B=2, H=1), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("macro", "kernel", "fault"),
    [(macro, kernel, fault) for macro, (kernel, faults) in VARIANTS.items() for fault in faults],
    ids=str,
)
def test_planted_fault_is_detected(
    macro: str, kernel: str, fault: Hopper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(macro)
    use(monkeypatch, module, multiprocessors=5 if fault.case is PARTS else 1)
    detects(module, compiled_ptx("sm_90a", macro), fault, f"hopper/{kernel}_bf16.cu", tmp_path, (f"-D{macro}",))
