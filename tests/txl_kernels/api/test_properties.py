"""Random shapes, strides, intervals and dtypes: every backend against the float64 reference."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from against_reference import matches_the_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Case, skipping_refusals

# At the ends of tiles and of strips, and one beyond.
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 15, 16, 17, 47, 48, 49, 95, 97, 130)
MEMORIES = (0, 1, 2, 15, 47, 64, 90, 143, 191, 192, 193, 300, 511, 513, 700)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 41, 48, 64, 65, 80, 96, 128, 129)
ANY = {"B": st.integers(0, 3), "H": st.integers(1, 5), "L": st.sampled_from(LENGTHS), "M": st.sampled_from(MEMORIES)}
# Compiled anew for every width, or interpreted.
FEW = {"B": st.integers(1, 2), "H": st.integers(1, 3), "L": st.integers(1, 40), "M": st.integers(0, 50)}


def cases(sizes: dict[str, st.SearchStrategy[int]], widths: tuple[int, ...]) -> st.SearchStrategy[Case]:
    """Calls of such sizes; without a key there are none to draw intervals among."""
    built = st.builds(
        Case,
        name=st.just(""),
        **sizes,
        D=st.sampled_from(widths),
        causal=st.booleans(),
        window=st.none() | st.sampled_from((1, 2, 47, 192, 10**12)) | st.integers(1, 800),
        intervals=st.sampled_from(["", "random", "padded", "filled", "episodes", "empty"]),
        dropout_p=st.sampled_from([0.0, 0.1, 0.5]),
        layout=st.sampled_from(["bhld", "lbhd", "fused"]),
        scale=st.sampled_from((None, None, 0.0, 1e-6, 0.3, -0.2)),
        extra_rows=st.sampled_from((0, 0, 1, 50)),
        seed=st.integers(0, 2**16),
    )
    return built.map(lambda case: case if case.S else replace(case, intervals=""))


def test_terms_beyond_the_papers_match_the_reference(kernel_backend: str) -> None:
    """Values of any width, softcap, numbers a distance, at the ends of tiles."""
    examples, sizes, widths = (8, FEW, (16, 41)) if kernel_backend == "triton" else (80, ANY, WIDTHS)
    more = st.fixed_dictionaries(
        {
            "Dv": st.sampled_from(widths),
            "tables": st.sampled_from(("r", "r_bias", "both")),
            "softcap": st.sampled_from((0.0, 0.0, 0.5, 30.0)),
        }
    )

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases(sizes, widths), more=more, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, more: dict[str, Any], dtype: torch.dtype) -> None:
        # A refusal by name is not what this is about.
        with contextlib.suppress(pytest.skip.Exception), skipping_refusals(kernel_backend):
            matches_the_reference(replace(case, **more), dtype, kernel_backend)

    check()


def test_kernels_match_the_reference(kernel_backend: str) -> None:
    examples, calls = (10, cases(FEW, (16, 41, 64))) if kernel_backend == "triton" else (150, cases(ANY, WIDTHS))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=calls, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, dtype: torch.dtype) -> None:
        matches_the_reference(case, dtype, kernel_backend)

    check()
