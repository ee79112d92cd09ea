"""A kernel's error against float64 is at most twice that of the same algorithm written in eager
PyTorch (2022, Dao)."""

import pytest
import torch
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import Case

from txl_kernels.backends import triton
from txl_kernels.backends.triton import config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_eager(
    case: Case, dtype: torch.dtype, kernel_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton.interpreted():
        # The interpreter spends its time by the tile, and truncates where a GPU rounds to bfloat16.
        monkeypatch.setattr(config, "choose", lambda *args: config.Config(64, 64, 4, 1))
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    require_at_most_twice_eager(case, dtype, kernel_backend)
