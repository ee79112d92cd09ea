"""Marks of tests that execute Triton's PTX."""

import os

import pytest

from txl_kernels.backends import triton

RUNS_TRITONS_PTX = [
    pytest.mark.slow,
    pytest.mark.skipif(triton.why_not_loaded() is not None, reason=str(triton.why_not_loaded())),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled for the interpreter"),
]
