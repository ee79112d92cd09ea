"""Random shapes, strides, intervals and dtypes: every backend against the float64 reference."""

import torch
from against_reference import matches_the_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Case


def cases(length: int, memory: int, widths: st.SearchStrategy[int]) -> st.SearchStrategy[Case]:
    """Calls of up to `length` queries and `memory` keys before them."""
    return st.builds(
        Case,
        name=st.just(""),
        B=st.integers(1, 2),
        H=st.integers(1, 3),
        L=st.integers(1, length),
        M=st.integers(0, memory),
        D=widths,
        causal=st.booleans(),
        window=st.none() | st.integers(1, 300),
        intervals=st.sampled_from(["", "random", "padded", "filled", "episodes", "empty"]),
        dropout_p=st.sampled_from([0.0, 0.2]),
        layout=st.sampled_from(["bhld", "lbhd", "fused"]),
        seed=st.integers(0, 2**16),
    )


def test_kernels_match_the_reference(kernel_backend: str) -> None:
    examples, calls = 60, cases(120, 420, st.integers(1, 70))
    if kernel_backend == "triton":  # compiled anew for every width, or interpreted
        examples, calls = 10, cases(40, 50, st.sampled_from([16, 41, 64]))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=calls, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, dtype: torch.dtype) -> None:
        matches_the_reference(case, dtype, kernel_backend)

    check()
