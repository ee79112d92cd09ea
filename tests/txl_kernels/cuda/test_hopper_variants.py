"""Instances of the Hopper kernels that no device has timed, which a macro chooses: nvcc's PTX,
executed as in test_hopper_ptx.py."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Case
from cuda_cases import HOPPER, use
from cuda_ptx import PtxModule, compile_ptx, compiled_ptx, ptx_module
from oracle import matches_the_reference
from planted_faults import (
    EARLY_START,
    NARROW,
    NOTHING,
    POSITIONS,
    TWO_WARPGROUPS,
    WIDE,
    WIDE_LONG,
    Hopper,
    plant,
)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
TWO = "TXL_TWO_WARPGROUPS"  # both kernels of backward at width 128
EARLY = "TXL_EARLY_START"  # backward's kernels begin while the one before ends
CASES = [(TWO, case) for case in [*(case for case in HOPPER if case.D > 64), WIDE_LONG]]
CASES += [(EARLY, case) for case in (NARROW, WIDE, NOTHING, POSITIONS)]
DTYPES = (torch.float16, torch.bfloat16)


def module_of(macro: str) -> PtxModule:
    module = ptx_module(macro)
    module.early = ("backward_keys", "finish") if macro == EARLY else ()
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


@pytest.mark.parametrize("macro", [TWO])
@pytest.mark.parametrize("first", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
def test_warpgroups_in_any_order(first: tuple[int, ...], kernels: PtxModule) -> None:
    kernels.first = first
    matches_the_reference(WIDE, torch.bfloat16, "cuda")


@pytest.mark.parametrize("macro", [TWO, EARLY])
def test_split_keys(kernels: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, kernels, multiprocessors=132)
    matches_the_reference(Case("memory", L=70, M=600, D=128, B=1, H=1), torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels", "the_same_bits")
@pytest.mark.parametrize("macro", [TWO, EARLY])
def test_gradients_with_the_same_bits() -> None:
    """dr is summed in a table for each block of a launch."""
    matches_the_reference(Case("two rows", L=130, M=70, D=128, B=2, H=1), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("macro", "fault"), [(TWO, fault) for fault in TWO_WARPGROUPS] + [(EARLY, fault) for fault in EARLY_START], ids=str
)
def test_planted_fault_is_detected(macro: str, fault: Hopper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(macro)
    csrc = plant(tmp_path, fault.name, fault.edit)
    planted = compile_ptx(tmp_path, "sm_90a", csrc, ("hopper/backward_bf16.cu",), (f"-D{macro}",))
    module.use(compiled_ptx("sm_90a", macro) + planted)  # the later of a name
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    try:
        matches_the_reference(fault.case, torch.bfloat16, "cuda")
        wrong = ""
    except AssertionError as error:
        wrong = str(error)
    faults, module.faults = module.faults, []
    assert faults or (wrong and not fault.seen), "not detected"
    assert any(fault.seen in str(x) for x in faults) or not fault.seen, faults[0]
