"""The sentences of `txl demo` about what memory is worth, from given scores."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from txl import ModelConfig, TransformerXL
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
def test_demo_claims_what_was_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bpc, line = LINES[name]

    def evaluate(text: object, reading: Reading, **options: Any) -> Score:
        return Score(reading.attn_len, 32768, bpc.get(reading, 4.5) * math.log(2), 1.0)

    monkeypatch.setattr(demo, "times", lambda saved, text, readings: [2.0, 5.0, *[1.0] * 7, 321.0])
    demo.show_lengths(SimpleNamespace(attn_len=384, evaluate=evaluate), SimpleNamespace(test=range(50000)), 128)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith(
        f"{line} Cached memory is 321 times as fast as the paper's vanilla evaluation at attention length "
        "1,536, measured here."
    )
    assert "tokens/s" not in shown


def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[float | None]) -> str:
    def evaluate(text: object, reading: Reading, **options: Any) -> Score:
        return Score(reading.attn_len, 32768, 3.0, 1.0)

    monkeypatch.setattr(demo, "times", lambda *_: found)
    demo.show_lengths(SimpleNamespace(attn_len=384, evaluate=evaluate), SimpleNamespace(test=range(50000)), 128)
    return capsys.readouterr().out


def test_time_of_a_token_is_a_multiple_of_the_first_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: a line a reading where there is no bar."""
    shown = show(monkeypatch, capsys, [2.0, 5.0, *[1.0] * 5, None, 1.0, 300.0])
    before, table = shown.split("What memory is worth", 1)
    assert [line.split(": ")[1] for line in before.splitlines() if "bpc" in line] == ["4.328 bpc"] * 9
    last = [line.split("│")[-2].strip() for line in table.splitlines() if line.startswith("│")]
    assert last == ["1.00x", "2.50x", *["0.50x"] * 5, "rounds differ", "0.50x"]
    for disturbed in ([None, 5.0, *[1.0] * 7, 300.0], [2.0, *[1.0] * 8, None]):
        shown = " ".join(show(monkeypatch, capsys, disturbed).split())
        assert shown.count("rounds differ") == (9 if disturbed[0] is None else 0)
        assert ("is left out: other work disturbed the measurement." in shown) == (disturbed[-1] is None)


@pytest.mark.parametrize(("slow", "kept"), [(1.4, True), (1.6, False)])
def test_disturbed_rounds_give_no_time(monkeypatch: pytest.MonkeyPatch, slow: float, kept: bool) -> None:
    """The first step, of first calls, does not count."""
    model = TransformerXL(ModelConfig(vocab_size=9, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8, mem_len=4))
    clock = iter([x for taken in (90.0, 1.0, 1.2, slow, 1.1, 1.3) for x in (0.0, taken)])
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    found = demo.times(SimpleNamespace(model=model), np.zeros(60, np.uint8), [Reading(8, method="cached", segment=4)])
    assert found == [0.25 if kept else None]
