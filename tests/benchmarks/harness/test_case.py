"""Cases travel through records as fields, and their titles say all of them."""

import json

import pytest

from harness.case import Case, Shape

CASES = {
    "": Case(),
    "forward, B1 H2 L3 M4 D5": Case(direction="forward", shape=Shape(1, 2, 3, 4, 5)),
    "a, 12 layers, attention length 800, one token": Case(unit="token", model="a", layers=12, attn_len=800),
    "a, forward, b": Case(direction="forward", model="a", note="b"),
    "a, 1 layer, a note": Case(unit="step", model="a", layers=1, note="a note"),
}


@pytest.mark.parametrize(("title", "case"), CASES.items())
def test_there_and_back(title: str, case: Case) -> None:
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert str(case) == title


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="length"):
        Case.from_json({"length": 3})
