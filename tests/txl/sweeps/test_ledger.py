"""What a sweep's folder keeps, and what it refuses."""

import json
from pathlib import Path

import pytest

from txl.errors import TxlError
from txl.evaluation.evaluate import Score
from txl.sweeps import ledger as ledgers
from txl.sweeps.ledger import Ledger, Progress

SETTINGS = {"table": "table6", "scale": "tiny", "corpus": "ab" * 32, "minutes": None, "steps": 3, "eval_tokens": None}
ROWS = {"recurrence": {"recipe": "wt103-128m", "model": {"d_model": 16}, "train": {"lr": 0.1}, "reading": {"step": 2}}}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    (tmp_path / "corpus").mkdir()
    made = Ledger(tmp_path, SETTINGS, ROWS, tmp_path / "corpus")
    made.write()
    return made


def test_it_is_read_as_it_was_written(ledger: Ledger) -> None:
    assert ledgers.read(ledger.folder) == ledger
    assert json.loads((ledger.folder / "sweep.json").read_text())["corpus"] == "corpus", (
        "so that the folder can be moved"
    )
    assert ledgers.read(ledger.folder / "corpus") is None


def test_progress_is_kept_to_the_last_bit(ledger: Ledger) -> None:
    assert ledger.progress("recurrence") == Progress()
    kept = Progress({"steps": 3}, True, None, 7, "cpu", 1, 0.1 + 0.2, (Score(8, 100, 1 / 3, 2 / 3),))
    ledger.keep("recurrence", kept)
    assert ledger.progress("recurrence") == kept


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("table", "table10", "table is table10, was table6"),
        ("scale", "small", "scale is small, was tiny"),
        ("corpus", "cd" * 32, r"corpus is cdcdcdcdcdcd\.\., was abababababab\.\."),
        ("minutes", 2.0, "minutes is 2.0, was None"),
        ("steps", 4, "steps is 4, was 3"),
        ("eval_tokens", 9, "eval_tokens is 9, was None"),
    ],
)
def test_other_settings_are_refused_by_name(ledger: Ledger, name: str, value: object, words: str) -> None:
    ledger.refuse_others(SETTINGS, ROWS)
    with pytest.raises(TxlError, match=rf"holds another sweep: {words}; choose another folder with --run$"):
        ledger.refuse_others(SETTINGS | {name: value}, ROWS)


def test_rows_that_another_version_would_make_otherwise(ledger: Ledger) -> None:
    other = json.loads(json.dumps(ROWS))
    other["recurrence"]["model"]["d_model"] = 18
    other["recurrence"]["train"]["clip"] = 1
    with pytest.raises(TxlError, match="recurrence's d_model is 18, was 16; recurrence's clip is 1, was None; choose"):
        ledger.refuse_others(SETTINGS, other)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"format": "txl-sweep-0"}', '{"format": "txl-sweep-1", "settings": {}}']
)
def test_a_damaged_ledger(ledger: Ledger, text: str) -> None:
    (ledger.folder / "sweep.json").write_text(text)
    with pytest.raises(TxlError, match=r"sweep\.json: no ledger that can be read"):
        ledgers.read(ledger.folder)


@pytest.mark.parametrize("text", ["", "[]", '{"scores": 3}', '{"scores": [{"nats": 1}]}', '{"scores": [], "x": 1}'])
def test_a_damaged_row(ledger: Ledger, text: str) -> None:
    ledger.keep("recurrence", Progress())
    (ledger.folder / "recurrence" / "row.json").write_text(text)
    with pytest.raises(TxlError, match=r"row\.json: is damaged .*; remove .*recurrence to begin the row anew$"):
        ledger.progress("recurrence")
