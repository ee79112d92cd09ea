"""A row's training and scores: stopped anywhere, they go on as if nothing had been."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import assert_same_run

from txl.errors import TxlError
from txl.evaluation.evaluate import Score
from txl.sweeps import ledger as ledgers
from txl.sweeps import row as rows
from txl.sweeps.ledger import Progress
from txl.training import checkpoint as checkpoints
from txl.training.trainer import Interrupted, Trainer

RunSweep = Callable[..., None]
ROW = "recurrence-half"


@pytest.fixture
def whole(run_sweep: RunSweep, tmp_path: Path) -> Path:
    """A row that nothing stopped."""
    run_sweep(tmp_path / "whole", ROW)
    return tmp_path / "whole"


def progress(folder: Path) -> Progress:
    ledger = ledgers.read(folder)
    assert ledger is not None
    return ledger.progress(ROW)


def assert_same_row(folder: Path, whole: Path) -> None:
    assert_same_run(folder / ROW, whole / ROW)
    a, b = progress(folder), progress(whole)
    assert a.finished is not None
    assert [(s.attn_len, s.nats) for s in a.scores] == [(s.attn_len, s.nats) for s in b.scores]


def forbid(monkeypatch: pytest.MonkeyPatch, *where: tuple[object, str]) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError("was done already")

    for owner, name in where:
        monkeypatch.setattr(owner, name, called)


def at_update(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[Trainer], None]) -> None:
    """Calls an action before an update, counted from 1."""
    update = Trainer._update

    def patched(self: Trainer) -> tuple[float, float]:
        if self.step + 1 == step:
            action(self)
        return update(self)

    monkeypatch.setattr(Trainer, "_update", patched)


def fail(_: Trainer) -> None:
    raise TxlError("the loss became nan")


def test_a_row_that_failed_goes_on_from_its_last_checkpoint(
    run_sweep: RunSweep, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        at_update(patched, 6, fail)
        with pytest.raises(TxlError, match=f"^1 of 1 rows failed: {ROW}; the same command tries them again$"):
            run_sweep(tmp_path / "r", ROW)
    assert progress(tmp_path / "r").trained is False
    at_update(monkeypatch, 4, fail)  # which is in the checkpoint
    run_sweep(tmp_path / "r", ROW)
    assert_same_row(tmp_path / "r", whole)


@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_row_that_was_asked_to_stop(
    run_sweep: RunSweep, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patched:
        at_update(patched, step, Trainer.request_stop)
        with pytest.raises(Interrupted):
            run_sweep(tmp_path / "r", ROW)
    assert progress(tmp_path / "r").trained == (step == 8)
    assert progress(tmp_path / "r").scores == ()
    at_update(monkeypatch, step, fail)
    run_sweep(tmp_path / "r", ROW)
    assert_same_row(tmp_path / "r", whole)


def test_a_row_killed_before_its_first_checkpoint(
    run_sweep: RunSweep, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(tmp_path / "r", ROW)
    assert not list((tmp_path / "r" / ROW).glob("*.safetensors"))
    run_sweep(tmp_path / "r", ROW)
    assert_same_row(tmp_path / "r", whole)


def test_a_row_is_scored_as_its_plan_says(run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, asked = rows.evaluate, []

    def watched(model: Any, tokens: Any, start: int, reading: Any, **how: Any) -> Score:
        told = {"clamp_len": reading.clamp_len, "method": reading.method}
        asked.append(told | {name: how[name] for name in ("limit", "batch")})
        return evaluate(model, tokens, start, reading, **how)

    monkeypatch.setattr(rows, "evaluate", watched)
    run_sweep(tmp_path / "r", "151m")
    assert asked[0] == {"clamp_len": 50, "limit": 128, "method": "cached", "batch": 8}
    assert all(each == asked[0] for each in asked)


def test_scores_are_kept_as_soon_as_they_are_measured(
    run_sweep: RunSweep, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, asked = rows.evaluate, []

    def third_is_interrupted(model: Any, tokens: Any, start: int, reading: Any, **how: Any) -> Score:
        asked.append(reading.attn_len)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(model, tokens, start, reading, **how)

    monkeypatch.setattr(rows, "evaluate", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tmp_path / "r", ROW)
    assert [score.attn_len for score in progress(tmp_path / "r").scores] == asked[:2]
    forbid(monkeypatch, (rows, "Trainer"), (rows, "timed"))
    run_sweep(tmp_path / "r", ROW)
    assert asked[3:] == [score.attn_len for score in progress(whole).scores][2:]
    assert_same_row(tmp_path / "r", whole)


def test_a_finished_row_is_left_alone(run_sweep: RunSweep, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (whole / ROW).iterdir()}

    before = written()
    forbid(monkeypatch, (rows, "Trainer"), (rows, "evaluate"))
    run_sweep(whole, ROW)
    assert written() == before


def test_minutes_become_updates_once(run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        at_update(patched, 30, fail)
        with pytest.raises(TxlError, match="1 of 1 rows failed"):
            run_sweep(tmp_path, ROW, minutes=0.01)
    steps = progress(tmp_path).train["steps"]
    assert steps > 30
    forbid(monkeypatch, (rows, "timed"))
    run_sweep(tmp_path, ROW, minutes=0.01)
    assert checkpoints.load(tmp_path / ROW / "last.safetensors").state["step"] == steps


def test_a_loss_that_is_no_number(
    run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "evaluate", lambda *_, **__: Score(32, 10, math.nan, 1.0))
    with pytest.raises(TxlError, match="1 of 1 rows failed"):
        run_sweep(tmp_path, ROW)
    assert capfd.readouterr().err == f"{ROW} failed: the loss at attention length 32 is nan\n"
    assert progress(tmp_path).scores == ()


def test_what_nobody_foresaw_is_a_line_and_a_file(
    run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Trainer) -> None:
        raise ZeroDivisionError("by\nnothing")

    at_update(monkeypatch, 2, broken)
    with pytest.raises(TxlError, match="1 of 1 rows failed"):
        run_sweep(tmp_path, ROW)
    path = tmp_path / ROW / "error.txt"
    assert capfd.readouterr().err == f"{ROW} failed: ZeroDivisionError: by nothing (the traceback is in {path})\n"
    assert "in broken" in path.read_text()


def test_a_foreign_run_is_no_row(run_sweep: RunSweep, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "r" / ROW).mkdir(parents=True)
    (whole / ROW / "last.safetensors").rename(tmp_path / "r" / ROW / "last.safetensors")
    with pytest.raises(TxlError, match=f"{ROW}: already holds a run"):
        run_sweep(tmp_path / "r", ROW)
    with pytest.raises(TxlError, match=f"{ROW}: already holds a run"):
        run_sweep(tmp_path / "r" / ROW, ROW)


def test_seconds_add_up_over_sessions(run_sweep: RunSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        at_update(patched, 5, Trainer.request_stop)
        with pytest.raises(Interrupted):
            run_sweep(tmp_path, ROW)
    ledger = ledgers.read(tmp_path)
    first = ledger.progress(ROW)
    assert first.train_seconds > 0
    ledger.keep(ROW, dataclasses.replace(first, train_seconds=1000.0))
    run_sweep(tmp_path, ROW)
    assert 1000 < progress(tmp_path).train_seconds < 1100
