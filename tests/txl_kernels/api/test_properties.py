"""Random calls: features against the definition; shapes, layouts, intervals and dtypes of kernels
against the float64 reference."""

import contextlib
from typing import Any

import pytest
import torch
from cases import BIAS_ALONE, FEATURES, Case, compatible, composed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import matches_the_definition, matches_the_reference

Sizes = dict[str, st.SearchStrategy[int]]
# At the ends of tiles and of strips, and one beyond.
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 15, 16, 17, 47, 48, 49, 95, 97, 130)
MEMORIES = (0, 1, 2, 15, 47, 64, 90, 143, 191, 192, 193, 300, 511, 513, 700)
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 41, 48, 64, 65, 80, 96, 128, 129)
ANY: Sizes = {"B": st.integers(0, 3), "L": st.sampled_from(LENGTHS), "M": st.sampled_from(MEMORIES)}
# Compiled anew for every width, or interpreted.
FEW: Sizes = {"B": st.integers(1, 2), "L": st.integers(1, 40), "M": st.integers(0, 50)}
# Small enough for the definition: no memory and some, one query with a long one.
SMALL: Sizes = {"B": st.integers(1, 2), "L": st.integers(1, 9), "M": st.sampled_from((0, 4, 40))}


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def test_random_features_match_the_definition(backend: str) -> None:
    sizes = st.fixed_dictionaries(SMALL | {"D": st.sampled_from((1, 4, 9))})
    features = st.lists(st.sampled_from(list(FEATURES)), unique=True, max_size=8).map(tuple).filter(compatible)

    @examples(8 if backend == "triton" else 50)
    @given(sizes=sizes, names=features)
    def check(sizes: dict[str, int], names: tuple[str, ...]) -> None:
        if "prefix" in names:
            sizes["L"] = max(sizes["L"], 2)
        with contextlib.suppress(pytest.skip.Exception):  # refused by name: on to what is not
            matches_the_definition(composed(names, **sizes), backend)

    check()


def calls(sizes: Sizes, widths: tuple[int, ...]) -> st.SearchStrategy[Case]:
    """Calls of such sizes, half of them of the paper's formula alone."""
    paper = {
        **sizes,
        "D": st.sampled_from(widths),
        "causal": st.booleans(),
        "window": st.none() | st.sampled_from((1, 2, 47, 192, 10**12)) | st.integers(1, 800),
        "intervals": st.sampled_from(["", "random", "padded", "filled", "episodes", "alternate"]),
        "dropout_p": st.sampled_from([0.0, 0.1, 0.5]),
        "layout": st.sampled_from(["bhld", "lbhd", "fused"]),
        "scale": st.sampled_from((None, None, 0.0, 1e-6, 0.3, -0.2)),
        "extra_rows": st.sampled_from((0, 0, 1, 50)),
        "seed": st.integers(0, 2**16),
    }
    values = {"Dv": st.sampled_from((0, *widths)), "softcap": st.sampled_from((0.0, 0.0, 0.5, 30.0))}
    grouped = {
        "Hkv": st.integers(1, 3),
        "Dp": st.sampled_from((0, *widths)),
        "Dv": st.sampled_from((0, *widths)),
        "position_scale": st.sampled_from((None, 1.0, -0.4)),
        "sink": st.sampled_from((None, "H", "B H L")),
    }
    tables: list[dict[str, Any]] = [{}, {"r_bias": "H T"}, BIAS_ALONE]
    table = {"T": st.sampled_from((1, 7, 64, 200)), "zero_row": st.sampled_from((0, 3, 90)), "outside": st.just("zero")}
    plain, general = (st.fixed_dictionaries(paper | more) for more in ({}, grouped))
    built = plain.map(lambda x: Case(**x))
    built |= st.builds(lambda x, y, z: Case(**x | y | z), plain, st.fixed_dictionaries(values), st.sampled_from(tables))
    built |= st.builds(
        lambda x, H, y, z: Case(**x | {"H": x["Hkv"] * H} | y | z),
        general, st.integers(1, 3), st.just({}) | st.fixed_dictionaries(table), st.sampled_from(tables[:2]),
    )  # fmt: skip
    return built.map(lambda case: case if case.S else case.but(intervals=""))  # without a key there are no intervals


def test_random_calls_match_the_reference(kernel_backend: str) -> None:
    is_triton = kernel_backend == "triton"
    heads = {"H": st.integers(1, 3 if is_triton else 5)}
    drawn = calls(FEW | heads, (16, 41, 64)) if is_triton else calls(ANY | heads, WIDTHS)

    @examples(18 if is_triton else 120)
    @given(case=drawn, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def check(case: Case, dtype: torch.dtype) -> None:
        with contextlib.suppress(pytest.skip.Exception):  # a refusal by name is not what this is about
            matches_the_reference(case, dtype, kernel_backend)

    check()
