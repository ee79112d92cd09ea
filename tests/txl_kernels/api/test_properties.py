"""Random shapes, strides, intervals and dtypes: every backend against the float64 reference."""

import contextlib
from dataclasses import replace

import pytest
import torch
from cases import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import matches_the_reference

# At the ends of tiles and of strips, and one beyond.
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 15, 16, 17, 47, 48, 49, 95, 97, 130)
MEMORIES = (0, 1, 2, 15, 47, 64, 90, 143, 191, 192, 193, 300, 511, 513, 700)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 41, 48, 64, 65, 80, 96, 128, 129)
ANY = {"B": st.integers(0, 3), "H": st.integers(1, 5), "L": st.sampled_from(LENGTHS), "M": st.sampled_from(MEMORIES)}
# Compiled anew for every width, or interpreted.
FEW = {"B": st.integers(1, 2), "H": st.integers(1, 3), "L": st.integers(1, 40), "M": st.integers(0, 50)}


def cases(sizes: dict[str, st.SearchStrategy[int]], widths: tuple[int, ...]) -> st.SearchStrategy[Case]:
    """Calls of such sizes, half of them of the paper's formula alone; without a key there are no
    intervals to draw."""
    paper = {
        "name": st.just(""),
        **sizes,
        "D": st.sampled_from(widths),
        "causal": st.booleans(),
        "window": st.none() | st.sampled_from((1, 2, 47, 192, 10**12)) | st.integers(1, 800),
        "intervals": st.sampled_from(["", "random", "padded", "filled", "episodes", "empty"]),
        "dropout_p": st.sampled_from([0.0, 0.1, 0.5]),
        "layout": st.sampled_from(["bhld", "lbhd", "fused"]),
        "scale": st.sampled_from((None, None, 0.0, 1e-6, 0.3, -0.2)),
        "extra_rows": st.sampled_from((0, 0, 1, 50)),
        "seed": st.integers(0, 2**16),
    }
    terms = {
        "Dv": st.sampled_from(widths),
        "tables": st.sampled_from(("r", "r_bias", "both")),
        "softcap": st.sampled_from((0.0, 0.0, 0.5, 30.0)),
    }
    inkling = {
        "Dp": st.sampled_from((0, *widths)),
        "Dv": st.sampled_from((0, *widths)),
        "Hkv": st.integers(1, 3),
        "position_scale": st.sampled_from((None, 1.0, -0.4)),
        "sink": st.sampled_from(("", "heads", "queries")),
    }
    beyond = {
        "outside": st.just("zero"),
        "rows": st.sampled_from((1, 7, 64, 200)),
        "zero_row": st.sampled_from((0, 3, 90)),
        "tables": st.sampled_from(("r", "both")),
    }
    built = st.builds(Case, **paper) | st.builds(Case, **paper, **terms)
    general = st.builds(Case, **paper, **inkling) | st.builds(Case, **paper, **inkling, **beyond)
    built |= general.map(lambda case: replace(case, H=case.Hkv * min(case.H, 3)))
    return built.map(lambda case: case if case.S else replace(case, intervals=""))


def test_kernels_match_the_reference(kernel_backend: str) -> None:
    examples, calls = (18, cases(FEW, (16, 41, 64))) if kernel_backend == "triton" else (240, cases(ANY, WIDTHS))

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=calls, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, dtype: torch.dtype) -> None:
        with contextlib.suppress(pytest.skip.Exception):  # a refusal by name is not what this is about
            matches_the_reference(case, dtype, kernel_backend)

    check()
