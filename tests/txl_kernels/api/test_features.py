"""Everything that a call can ask for, in pairs and by chance, against the definition.

Each pair composes: whatever a backend does not take it refuses by name, and the test is skipped.
"""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from cases import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import matches_the_definition

BASE = Case("", L=5, M=0, D=4)
FEATURES: dict[str, dict[str, Any]] = {
    "values": {"Dv": 7},
    "numbers": {"tables": "both"},
    "numbers alone": {"tables": "r_bias", "r_bias_heads": 1},
    "table for all heads": {"r_axes": (1,)},
    "table of each batch row": {"r_axes": (2, 2)},
    "memory": {"M": 4},
    "bounds": {"intervals": "random"},
    "packed": {"packed": (2, 0, 3), "B": 1},
    "clamp": {"rows": 4, "zero_row": 2, "outside": "clamp"},
    "descending": {"r_descending": True},
    "softcap": {"softcap": 0.7},
    "window": {"window": (2, 1)},
    "chunk": {"chunk": (2, 1), "causal": False},
    "prefix": {"prefix": 2},
    "dropout": {"dropout_p": 0.3},
    "bidirectional": {"causal": False},
    "scale": {"scale": -0.8},
    "position scale": {"position_scale": 0.6},
    "position queries": {"Dp": 3},
    "outside": {"rows": 3, "zero_row": 1, "outside": "zero"},
    "grouped heads": {"H": 4, "Hkv": 2},
    "sinks": {"sink": "heads"},
}
# Two of the same, or refused: RelAttention's tests say which.
EXCLUSIVE = [
    {"numbers alone", "position queries"}, {"clamp", "outside"},
    {"numbers", "numbers alone"}, {"packed", "bounds"}, {"packed", "memory"},
    *map(set, itertools.combinations(("numbers alone", "table for all heads", "table of each batch row"), 2)),
]  # fmt: skip


def compose(names: tuple[str, ...], base: Case = BASE) -> Case:
    """The base with these features."""
    fields: dict[str, Any] = {}
    for name in names:
        fields |= FEATURES[name]
    if {"grouped heads", "table of each batch row"} <= set(names):
        fields["r_axes"] = (2, 4)
    if "packed" in names:
        fields["L"] = sum(fields["packed"])
        if "table of each batch row" in names:
            fields["r_axes"] = (1, *fields["r_axes"][1:])
    return replace(base, name=", ".join(names), **fields)


def compatible(names: tuple[str, ...]) -> bool:
    return not any(pair <= set(names) for pair in EXCLUSIVE)


@pytest.mark.parametrize("pair", [p for p in itertools.combinations(FEATURES, 2) if compatible(p)], ids=", ".join)
def test_every_pair(pair: tuple[str, str], backend: str) -> None:
    matches_the_definition(compose(pair), backend)


def test_any_number_of_features(backend: str) -> None:
    """Features and sizes by chance: no memory and some, one query with a long one."""
    sizes = {"B": st.integers(1, 2), "L": st.integers(1, 9), "D": st.sampled_from((1, 4, 9))}
    sizes |= {"M": st.sampled_from((0, 4, 40))}
    bases = st.builds(lambda **x: replace(BASE, **x), **sizes)
    chosen = st.lists(st.sampled_from(list(FEATURES)), unique=True, max_size=8).map(tuple).filter(compatible)

    @settings(
        max_examples=8 if backend == "triton" else 50, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=True,
    )  # fmt: skip
    @given(base=bases, names=chosen)
    def check(base: Case, names: tuple[str, ...]) -> None:
        if "table of each batch row" in names:
            base = replace(base, B=2)
        if "packed" in names:
            base = replace(base, M=0)
        if "prefix" in names:
            base = replace(base, L=max(base.L, 2))
        with contextlib.suppress(pytest.skip.Exception):  # refused by name: on to what is not
            matches_the_definition(compose(names, base), backend)

    check()
