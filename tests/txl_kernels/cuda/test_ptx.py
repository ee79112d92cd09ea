"""nvcc's PTX of the CUDA decode kernels, executed by tools/ptx: values, races, bounds. Each case
runs on both architectures, in different dtypes."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from cases import Case
from cuda_cases import INKLING, MATRIX, use, within_the_error_budget
from cuda_ptx import compiled_ptx, ptx_module
from oracle import matches_the_definition

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOME = [case for case in MATRIX + INKLING if case.B * case.L]


@pytest.fixture
def kernels(architecture: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ptx_module()
    module.use(compiled_ptx(architecture))
    use(monkeypatch, module, capability=(8, 0))  # decode of any number of queries
    yield
    faults, module.faults = module.faults, []
    assert not faults, faults


@pytest.mark.usefixtures("kernels", "nan_filled")
@pytest.mark.parametrize(
    ("case", "architecture", "dtype"),
    [(case, f"sm_{80 + 10 * n}", DTYPES[(at + n) % 3]) for n in range(2) for at, case in enumerate(SOME)],
    ids=str,
)
@torch.no_grad()
def test_values(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        matches_the_definition(case, "cuda", dtype)
    else:
        within_the_error_budget(case, dtype)
