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
from planted_faults import NOTHING, OF_VARIANT, PARTS, POSITIONS, VARIANT, WIDE, WIDE_LONG, Hopper, detects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
SHORT = [case for case in HOPPER if case.D > 64 or case.name.startswith("blocks")]
INKLING = [case for case in HOPPER_INKLING if case.name.startswith(("a table", "nothing"))]
CASES = [*SHORT, *INKLING, WIDE_LONG, NOTHING, POSITIONS]
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def module() -> PtxModule:
    module = ptx_module(VARIANT)
    module.early = ("backward_keys", "finish", "early_merge")
    return module


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    return compiled_ptx("sm_90a", VARIANT)


@pytest.fixture
def kernels(module: PtxModule, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxModule]:
    module.use(compiled)
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


def test_split_keys(kernels: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, kernels, multiprocessors=132)
    matches_the_reference(Case("memory", L=70, M=600, D=128, B=1, H=1), torch.bfloat16, "cuda")


def test_split_keys_of_forward(kernels: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forward(PARTS, torch.bfloat16)
    use(monkeypatch, kernels, multiprocessors=5)
    for got, want in zip(forward(PARTS, torch.bfloat16), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("kernels", "the_same_bits")
def test_gradients_with_the_same_bits() -> None:
    """dr is summed in a table for each block of a launch."""
    matches_the_reference(Case("two rows", L=130, M=70, D=128, B=2, H=1), torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("direction", "fault"), [(name, fault) for name, faults in OF_VARIANT.items() for fault in faults], ids=str
)
def test_planted_fault_is_detected(
    direction: str, fault: Hopper, module: PtxModule, compiled: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(monkeypatch, module, multiprocessors=5 if fault.case is PARTS else 1)
    detects(module, compiled, fault, f"hopper/{direction}_bf16.cu", tmp_path, (f"-D{VARIANT}",))
