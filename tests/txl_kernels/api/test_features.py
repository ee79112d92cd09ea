"""Everything that a call can ask for, in pairs and by chance, against the definition.

Each pair composes: whatever a backend does not take it refuses by name, and the test is skipped.
"""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
from forms_oracle import FormCase, matches_the_definition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BASE = FormCase("", B=2, H=2, L=5, M=0, D=4, Dv=4)
FEATURES: dict[str, dict[str, Any]] = {
    "values": {"Dv": 7},
    "numbers": {"numbers": 2},
    "numbers alone": {"r": None, "numbers": 1},
    "table for all heads": {"r": (1,)},
    "table of each text": {"r": (2, 2)},
    "memory": {"M": 4},
    "bounds": {"start": True, "end": True},
    "packed": {"packed": (2, 0, 3), "B": 1},
    "clamp": {"rows": 4, "zero_row": 2, "clamp": True},
    "descending": {"r_descending": True},
    "softcap": {"softcap": 0.7},
    "window": {"window": (2, 1)},
    "chunk": {"chunk": (2, 1), "causal": False},
    "prefix": {"prefix": 2},
    "dropout": {"dropout_p": 0.3},
    "bidirectional": {"causal": False},
    "scale": {"scale": -0.8},
}
_FIELDS = set(FormCase.__dataclass_fields__)
# Two of the same, or refused: RelAttention's tests say which.
_EXCLUSIVE = [
    {"numbers", "numbers alone"}, {"packed", "bounds"}, {"packed", "memory"},
    *map(set, itertools.combinations(("numbers alone", "table for all heads", "table of each text"), 2)),
]  # fmt: skip


def compose(names: tuple[str, ...], base: FormCase = BASE) -> FormCase:
    """The base with these features."""
    fields: dict[str, Any] = {}
    for name in names:
        fields |= FEATURES[name]
    if "packed" in names:
        fields["L"] = sum(fields["packed"])
        if "table of each text" in names:
            fields["r"] = (1, 2)
    options = {name: x for name, x in fields.items() if name not in _FIELDS}
    return replace(base, name=", ".join(names), **{n: x for n, x in fields.items() if n in _FIELDS}, settings=options)


def compatible(names: tuple[str, ...]) -> bool:
    return not any(pair <= set(names) for pair in _EXCLUSIVE)


@pytest.mark.parametrize("pair", [p for p in itertools.combinations(FEATURES, 2) if compatible(p)], ids=", ".join)
def test_every_pair(pair: tuple[str, str], backend: str) -> None:
    matches_the_definition(compose(pair), backend)


def test_any_number_of_features(backend: str) -> None:
    """Features and sizes by chance."""
    sizes = {"B": st.integers(1, 2), "L": st.integers(1, 9), "D": st.sampled_from((1, 4, 9))}
    bases = st.builds(lambda **x: replace(BASE, **x, Dv=x["D"]), **sizes)
    chosen = st.lists(st.sampled_from(list(FEATURES)), unique=True, max_size=8).map(tuple).filter(compatible)

    @settings(
        max_examples=8 if backend == "triton" else 50, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=True,
    )  # fmt: skip
    @given(base=bases, names=chosen)
    def check(base: FormCase, names: tuple[str, ...]) -> None:
        if "table of each text" in names:
            base = replace(base, B=2)
        if "prefix" in names:
            base = replace(base, L=max(base.L, 2))
        with contextlib.suppress(pytest.skip.Exception):  # refused by name: on to what is not
            matches_the_definition(compose(names, base), backend)

    check()
