"""The sentences of `txl demo` about what memory is worth, from given scores."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from txl.commands import demo
from txl.evaluation.evaluate import Reading, Score

BARE, WINDOW = Reading(128, method="sliding", segment=128), Reading(128, method="sliding", segment=8)
LINES = {
    "beyond a segment": (
        {BARE: 4.356, WINDOW: 4.352, Reading(768, method="cached"): 4.342},
        "memory gains 0.014 bpc over segments without it, at its best attention length, 768. The window, in which no token "
        "begins blind (context fragmentation), gains 0.004 bpc and pays with its speed. Memory, which reaches further than "
        "a segment, gains 0.010 bpc over the window.",
    ),
    "within a segment": (
        {BARE: 4.356, WINDOW: 4.352, Reading(24, method="cached"): 4.342},
        "memory gains 0.014 bpc over segments without it, at its best attention length, 24. The window, in which no token "
        "begins blind (context fragmentation), gains 0.004 bpc and pays with its speed.",
    ),
    "worse than segments": (
        {BARE: 4.300, WINDOW: 4.310, Reading(384, method="cached"): 4.3201},
        "memory loses 0.020 bpc over segments without it, at its best attention length, 384. The window, in which no token "
        "begins blind (context fragmentation), loses 0.010 bpc and pays with its speed. Memory, which reaches further than "
        "a segment, loses 0.010 bpc over the window.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_demo_claims_what_was_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    bpc, line = LINES[name]

    def evaluate(text: object, reading: Reading, **options: Any) -> Score:
        return Score(reading.attn_len, 32768, bpc.get(reading, 4.5) * math.log(2), 1.0)

    demo.show_lengths(SimpleNamespace(attn_len=384, evaluate=evaluate), SimpleNamespace(test=range(50000)), 128)
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).endswith(line)
    assert "tokens/s" not in shown
