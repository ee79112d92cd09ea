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
from planted_faults import TWO_WARPGROUPS, WIDE, WIDE_LONG, Hopper, plant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
MACRO = "TXL_TWO_WARPGROUPS"  # both kernels of backward at width 128
CASES = [*(case for case in HOPPER if case.D > 64), WIDE_LONG]
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def module() -> PtxModule:
    return ptx_module(MACRO)


@pytest.fixture
def kernels(module: PtxModule, monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxModule]:
    module.use(compiled_ptx("sm_90a", MACRO))
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    yield module
    faults, module.faults = module.faults, []
    assert not faults, faults


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(CASES)], ids=str)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "cuda")


@pytest.mark.parametrize("first", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
def test_warpgroups_in_any_order(first: tuple[int, ...], kernels: PtxModule) -> None:
    kernels.first = first
    matches_the_reference(WIDE, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels")
def test_split_keys(module: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, module, multiprocessors=132)
    matches_the_reference(Case("memory", L=70, M=600, D=128, B=1, H=1), torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels", "the_same_bits")
def test_gradients_with_the_same_bits() -> None:
    """dr is summed in a table for each block of a launch."""
    matches_the_reference(Case("two rows", L=130, M=70, D=128, B=2, H=1), torch.bfloat16, "cuda")


@pytest.mark.parametrize("fault", TWO_WARPGROUPS, ids=str)
def test_planted_fault_is_detected(
    fault: Hopper, module: PtxModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csrc = plant(tmp_path, fault.name, fault.edit)
    planted = compile_ptx(tmp_path, "sm_90a", csrc, ("hopper/backward_bf16.cu",), (f"-D{MACRO}",))
    module.use(compiled_ptx("sm_90a", MACRO) + planted)  # the later of a name
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
