"""Cases as JSON and as titles; shares of the machine's limits."""

import json

import pytest

from harness.case import Case, Shape, add_shares

CASES = {
    "": Case(),
    "forward, B1 H2 L3 M4 D5": Case(direction="forward", shape=Shape(1, 2, 3, 4, 5)),
    "a, 12 layers, attention length 800, one token": Case(unit="token", model="a", layers=12, attn_len=800),
    "a, forward, b": Case(direction="forward", model="a", note="b"),
    "a, 1 layer, a note": Case(unit="step", model="a", layers=1, note="a note"),
}


@pytest.mark.parametrize(("title", "case"), CASES.items())
def test_json_and_title(title: str, case: Case) -> None:
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert str(case) == title


def test_shares_of_the_peak_of_the_same_dtype() -> None:
    rows = [
        {"gflops": 30.0, "gb_per_s": 4.0},
        {"gflops": 30.0, "dtype": "float32"},
        {"gflops": 30.0, "dtype": "bfloat16", "gb_per_s": 2.0},
        {"gflops": 30.0, "dtype": "float16"},
        {"gflops": 60.0, "limit": "operations"},
        {"gflops": 120.0, "limit": "operations", "dtype": "bfloat16"},
        {"gb_per_s": 8.0, "limit": "bytes"},
    ]
    for row in rows:
        row |= {"median_ms": 1.0, "fastest_ms": 1.0}
    add_shares(rows)
    assert [row.get("share_of_operations") for row in rows] == [0.5, 0.5, 0.25, None, None, None, None]
    assert [row.get("share_of_bytes") for row in rows] == [0.5, None, 0.25, None, None, None, None]
