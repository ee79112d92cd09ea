"""nvcc's PTX of the Hopper kernels, executed by tools/ptx: values, gradients, races, bounds,
missing waits for loads and products; faults planted in the source are detected."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import Case
from cuda_cases import HOPPER, HOPPER_INKLING, SPLIT, forward, use
from cuda_emulation import CSRC
from cuda_ptx import PtxModule, compile_ptx, compiled_ptx, ptx_module
from oracle import matches_the_reference
from planted_faults import BACKWARD, FORWARD, NARROW, POSITIONS, WIDE, Hopper, detects

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
DTYPES = (torch.float16, torch.bfloat16)  # in the other order than in test_hopper.py


@pytest.fixture(scope="module")
def module() -> PtxModule:
    return ptx_module()


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    return compiled_ptx("sm_90a")


@pytest.fixture
def kernels(module: PtxModule, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxModule]:
    module.use(compiled)
    module.first = ()
    use(monkeypatch, module, multiprocessors=1)
    yield module
    faults, module.faults = module.faults, []
    assert not faults, faults


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(
    ("case", "dtype"), [(case, DTYPES[n % 2]) for n, case in enumerate(HOPPER + HOPPER_INKLING)], ids=str
)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    matches_the_reference(case, dtype, "cuda")


def test_build_with_a_limit_ends_long_waits(tmp_path: Path, compiled: list[str]) -> None:
    """Every kernel that waits has a trap. Only a device shows that it ends in time."""
    limited = compile_ptx(tmp_path, "sm_90a", CSRC, ("hopper/*_bf16.cu",), options=("-DTXL_CLOCK_LIMIT=1000",))
    kernels = [kernel for text in limited for kernel in text.split(".visible .entry")[1:]]
    assert sum("mbarrier.try_wait" in x for x in kernels) == 12  # three of each width, and with queries of positions
    assert all(("mbarrier.try_wait" in x) == bool(re.search(r"\btrap;", x)) for x in kernels)
    assert not any(re.search(r"\btrap;", text) for text in compiled)


@pytest.mark.parametrize("first", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("case", [NARROW, WIDE, POSITIONS], ids=str)
def test_warpgroups_in_any_order(case: Case, first: tuple[int, ...], kernels: PtxModule) -> None:
    kernels.first = tuple(g for g in first if case.D == 64 or g < 2)
    matches_the_reference(case, torch.bfloat16, "cuda")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_keys(case: Case, module: PtxModule, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forward(case, torch.bfloat16)
    use(monkeypatch, module, multiprocessors=132)
    for got, want in zip(forward(case, torch.bfloat16), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("direction", "fault"),
    [("forward", fault) for fault in FORWARD] + [("backward", fault) for fault in BACKWARD],
    ids=str,
)
def test_planted_fault_is_detected(
    direction: str, fault: Hopper, module: PtxModule, compiled: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    use(monkeypatch, module, multiprocessors=1)
    detects(module, compiled, fault, f"hopper/{direction}_bf16.cu", tmp_path)
