"""Tables of results in a terminal of 80 columns: a line a row, nothing cut."""

import numpy as np
import pytest

from txl.commands import demo, measure
from txl.commands.console import console
from txl.evaluation.evaluate import Reading, Score
from txl.paper.recl import Effective


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 80)


def rows(shown: str) -> list[list[str]]:
    """The cells of each line of a table's body."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


class Trained:
    """A model of the default recipe's lengths, on a fast GPU."""

    attn_len = 384

    def evaluate(self, tokens: object, reading: Reading, **options: object) -> Score:
        return Score(reading.attn_len, demo.EVAL_TOKENS, 12.0, 0.01)


class Texts:
    test = np.zeros(demo.EVAL_TOKENS, np.uint8)


def test_the_table_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demo.show_lengths(Trained(), Texts(), 128)
    found = rows(capsys.readouterr().out)
    cached = [("cached memory", n) for n in (24, 48, 96, 192, 384, 768, 1536)]
    cached[4] = ("cached memory (training)", 384)
    names = [("no memory, segments of 128", 128), ("no memory, window moved by 8", 128), *cached]
    assert [(row[0], row[1]) for row in found] == [(name, str(length)) for name, length in names]
    assert all(row[2:] == ["17.312", "+0.000", "3,276,800"] for row in found[1:])


def test_the_table_of_effective_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["wt103-128m-half", "a-name-that-is-longer-than-its-column"]
    group = {name: Effective(1000, True, [], [], []) for name in names}
    measure.show_effective(
        dict.fromkeys((0.1, 0.5, 1.0), group), {name: [1234.5678, 23.4] for name in names}, "RECL in tokens"
    )
    first, *second = rows(capsys.readouterr().out)
    assert first == [names[0], ">= 1,000", ">= 1,000", ">= 1,000", "1234.568", "23.400"]
    assert "".join(row[0] for row in second) == names[1]
