"""A run that is killed at any moment and resumed equals one that was never stopped."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_helpers import assert_same_run, trainer, unlock

from txl import paths
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training import trainer as trainers
from txl.training.run import read_log
from txl.training.trainer import Trainer

# The first validation is the best: a rate far too high makes each later one worse.
WORSE: dict[str, Any] = {
    "steps": 6, "eval_every": 2, "save_every": 100, "lr": 1.0, "warmup": 6, "schedule": "constant", "clip": 1000.0,
    "log_every": 2,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "one validation": WORSE | {"steps": 2},
    "a checkpoint between": WORSE | {"steps": 4, "save_every": 3},
    "an average": WORSE | {"average": "triggered", "patience": 1},
}
QUICK = "one validation"


class Killed(BaseException):
    """An exception that no code catches, in place of SIGKILL."""


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Raise Killed after `after` of the beginnings and ends of writes and validations."""
    left = after

    def moment() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **options: Any) -> Any:
            moment()
            result = act(*arguments, **options)
            moment()
            return result

        return acting

    monkeypatch.setattr(os, "replace", watched(os.replace))
    monkeypatch.setattr(trainers, "append_text", watched(paths.append_text))
    monkeypatch.setattr(trainers, "evaluate", watched(trainers.evaluate))


def killed_while_it_validates(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: Any, **options: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(trainers, "evaluate", killed)
        with pytest.raises(Killed):
            run.run()
    unlock(run.folder)


def validations(run: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_log(run / "log.jsonl") if "valid_loss" in entry]


def assert_same(whole: Path, run: Path) -> None:
    assert_same_run(whole, run)
    assert (whole / "best.safetensors").read_bytes() == (run / "best.safetensors").read_bytes()
    assert not list(run.glob(".*.tmp"))


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS if x != QUICK)])
def test_killed_at_any_moment(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At each write, before and after it, and at the start and end of each validation."""
    options = OPTIONS[name]
    whole = trainer(tmp_path / "whole", corpus, **options)
    whole.run()
    assert checkpoints.load(whole.best).state["step"] == 2
    assert whole.updater.average.started == (name == "an average")
    for moment in range(1000):
        run = tmp_path / f"{moment}"
        with monkeypatch.context() as patched:
            dying(patched, moment)
            try:
                trainer(run, corpus, **options).run()
                break
            except Killed:
                unlock(run)
        trainer(run, corpus, resume=(run / "last.safetensors").exists(), **options).run()
        assert_same(whole.folder, run)
    assert moment >= 20, "fewer moments than writes"


def test_killed_twice_in_the_first_validation(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer(tmp_path / "whole", corpus, **WORSE)
    whole.run()
    run = tmp_path / "run"
    for resume in (False, True):
        killed_while_it_validates(trainer(run, corpus, resume=resume, **WORSE), monkeypatch)
    (run / ".last.safetensors.txl.tmp").touch()  # as SIGKILL leaves it; test_paths.py
    resumed = trainer(run, corpus, resume=True, **WORSE)
    assert (resumed.step, resumed.unvalidated) == (2, True)
    assert validations(run) == []
    resumed.run()
    assert_same(whole.folder, run)


def test_update_after_a_missed_validation(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_while_it_validates(trainer(tmp_path, corpus, **WORSE), monkeypatch)
    resumed = trainer(tmp_path, corpus, resume=True, **WORSE)
    resumed.advance(1)
    resumed.save()
    assert checkpoints.load(resumed.last).state["unvalidated"] is False
