"""`txl sweep` as a user runs it: rows that fail, stop or are killed go on, and what it refuses."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Run, one_line
from training_helpers import assert_same_run

from txl.commands import sweep
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading, Score
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training.trainer import Trainer

LONG = "--steps", "100000"
ROW = "recurrence-half"


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12,000 words, raw."""
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(" ".join(f"w{(n * n + 7 * k) % 200}" for k in range(24)) for n in range(480)) + "\n")
    return path


def command(folder: Path, words: Path, *more: object, table: str = "table6") -> list[str]:
    options = ("--run", folder, "--data", words, "--scale", "tiny", "--eval-tokens", 128, *more)
    return ["sweep", table, *map(str, options)]


def started(arguments: list[str]) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-m", "txl", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run where it is ignored
    )  # fmt: skip
    end = threading.Timer(120, child.kill)  # of a test that waits in vain
    end.daemon = True
    end.start()
    return child


def wait_for(condition: Callable[[], bool], child: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert child is None or child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, "a minute was not enough"
        time.sleep(0.02)


def kept(folder: Path, row: str = ROW) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / row / "row.json").read_text())
    return values


def test_a_table_a_row_of_which_fails(txl: Run, words: Path, tmp_path: Path) -> None:
    """The others go on; mended, the same command does what is left, and then nothing."""
    assert txl(*command(tmp_path, words, "--row", "recurrence", table="table7")).returncode == 0
    broken = tmp_path / "no-recurrence"
    broken.mkdir()
    (broken / "last.safetensors").write_text("not a checkpoint")
    done = txl(*command(tmp_path, words, table="table7"))
    assert done.returncode == 1
    failed, summary = done.stderr.splitlines()
    assert failed.startswith(f"no-recurrence failed: {broken / 'last.safetensors'}: not a whole safetensors file")
    assert summary == "error: 1 of 3 rows failed: no-recurrence; the same command tries them again"
    assert "recurrence-shaw: done" in done.stdout
    assert "recurrence: Transformer" not in done.stdout
    assert done.stdout.count("failed") == 1

    (broken / "last.safetensors").unlink()
    done = txl(*command(tmp_path, words, table="table7"))
    assert done.returncode == 0, done.stderr
    assert (
        "scale tiny: models, lengths and text are not the paper's: its figures are not reproduced here" in done.stdout
    )
    shown = done.stdout[done.stdout.rindex("\n", 0, done.stdout.index("Table 7")) + 1 :]
    again = txl(*command(tmp_path, words, table="table7"))
    assert again.stdout == shown
    for name in ("recurrence", "recurrence-shaw", "no-recurrence"):
        row = kept(tmp_path, name)
        scored = {score["attn_len"]: score["nats"] for score in row["scores"]}
        assert scored[row["reported"]["best"]] == min(scored.values())
        assert row["reported"]["init"] == row["about"]["model"]["mem_len"] + row["train"]["tgt_len"]
        assert row["about"]["corpus"] == data.load(tmp_path / "corpus").fingerprint


def test_one_row_and_then_the_others(txl: Run, words: Path, tmp_path: Path) -> None:
    done = txl(*command(tmp_path, words, "--row", "151m"))
    assert done.returncode == 0, done.stderr
    assert "151m: Transformer-XL, 1 layers x 18, " in done.stdout
    assert "at attention length 36; the paper's 23.35 at 300" in done.stdout
    assert "at attention length 54; the paper's 23.16 at 450" in done.stdout
    assert done.stdout.count("waiting") == 9
    done = txl(
        "sweep", "table6", "--run", tmp_path, "--scale", "tiny", "--eval-tokens", 128, "--row", "al-rfou-half"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("waiting") == 8
    assert "151m: Transformer-XL" not in done.stdout


@pytest.fixture
def whole(txl: Run, words: Path, tmp_path: Path) -> Path:
    """A row that nothing stopped."""
    assert txl(*command(tmp_path / "whole", words, "--row", ROW)).returncode == 0
    return tmp_path / "whole"


def assert_same_row(folder: Path, whole: Path) -> None:
    assert_same_run(folder / ROW, whole / ROW)
    a, b = kept(folder), kept(whole)
    assert a["finished"]
    assert [(s["attn_len"], s["nats"]) for s in a["scores"]] == [(s["attn_len"], s["nats"]) for s in b["scores"]]


def at_update(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[Trainer], None]) -> None:
    """Calls an action before an update, counted from 1."""
    update = Trainer._update

    def patched(self: Trainer) -> Any:
        if self.step + 1 == step:
            action(self)
        return update(self)

    monkeypatch.setattr(Trainer, "_update", patched)


def fail(_: Trainer) -> None:
    raise TxlError("the loss became nan")


def no_memory(_: Trainer) -> None:
    raise RuntimeError("CUDA out of memory")


STOP = Trainer.request_stop


@pytest.mark.parametrize(("step", "action"), [(6, fail), (6, no_memory), (1, STOP), (3, STOP), (8, STOP)])
def test_a_row_that_failed_or_stopped_goes_on(
    txl: Run, words: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int,
    action: Callable[[Trainer], None],
) -> None:  # fmt: skip
    with monkeypatch.context() as patched:
        at_update(patched, step, action)
        done = txl(*command(tmp_path / "r", words, "--row", ROW))
        assert done.returncode == (130 if action is STOP else 1), done.stderr
    assert kept(tmp_path / "r")["trained"] is (step == 8)  # asked to stop during the last update
    assert kept(tmp_path / "r")["scores"] == []
    at_update(monkeypatch, min(step, 4), fail)  # an update that is in the checkpoint
    assert txl(*command(tmp_path / "r", words, "--row", ROW)).returncode == 0
    assert_same_row(tmp_path / "r", whole)


def test_scores_are_kept_as_soon_as_they_are_measured(
    txl: Run, words: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, asked = sweep.evaluate, []

    def third_is_interrupted(model: Any, tokens: Any, start: int, reading: Reading, **how: Any) -> Score:
        asked.append(reading.attn_len)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return evaluate(model, tokens, start, reading, **how)

    monkeypatch.setattr(sweep, "evaluate", third_is_interrupted)
    assert txl(*command(tmp_path / "r", words, "--row", ROW)).returncode == 130
    assert [score["attn_len"] for score in kept(tmp_path / "r")["scores"]] == asked[:2]
    monkeypatch.setattr(sweep, "Trainer", None)
    assert txl(*command(tmp_path / "r", words, "--row", ROW)).returncode == 0
    assert asked[3:] == [score["attn_len"] for score in kept(whole)["scores"]][2:]
    assert_same_row(tmp_path / "r", whole)


def test_a_finished_row_is_left_alone(txl: Run, words: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (whole / ROW).iterdir()}

    before = written()
    for name in ("Trainer", "evaluate"):
        monkeypatch.setattr(sweep, name, None)
    assert txl(*command(whole, words, "--row", ROW)).returncode == 0
    assert written() == before


def test_minutes_become_updates_once(txl: Run, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command(tmp_path, words, "--row", ROW, "--minutes", "0.01")
    with monkeypatch.context() as patched:
        at_update(patched, 30, fail)
        assert txl(*arguments).returncode == 1
    steps = kept(tmp_path)["train"]["steps"]
    assert steps > 30
    monkeypatch.setattr(sweep, "timed", None)
    assert txl(*arguments).returncode == 0
    assert checkpoints.load(tmp_path / ROW / "last.safetensors").state["step"] == steps


def test_a_loss_that_is_no_number(txl: Run, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "evaluate", lambda *_, **__: Score(32, 10, math.nan, 1.0))
    done = txl(*command(tmp_path, words, "--row", ROW))
    assert done.stderr.splitlines()[0] == f"{ROW} failed: the loss at attention length 32 is nan"
    assert kept(tmp_path)["scores"] == []


def test_a_foreign_run_is_no_row(txl: Run, words: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "r" / ROW).mkdir(parents=True)
    (whole / ROW / "best.safetensors").rename(tmp_path / "r" / ROW / "best.safetensors")
    done = txl(*command(tmp_path / "r", words, "--row", ROW))
    assert f"{ROW}: already holds a run" in done.stderr


def test_kill_9_and_the_same_command(txl: Run, words: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path / "s", words, "--row", "recurrence", "--steps", "240")
    child = started(arguments)
    wait_for((tmp_path / "s" / "recurrence" / "last.safetensors").exists, child)
    child.kill()
    child.communicate()
    step = checkpoints.load(tmp_path / "s" / "recurrence" / "last.safetensors").state["step"]
    assert step < 240
    for folder in ("s", "whole"):
        done = txl(*command(tmp_path / folder, words, "--row", "recurrence", "--steps", "240"))
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "s" / "recurrence", tmp_path / "whole" / "recurrence")


def test_ctrl_c_and_a_second_sweep(txl: Run, words: Path, tmp_path: Path) -> None:
    """The checkpoint is written, and meanwhile the row is refused to others."""
    run = tmp_path / "a sweep"
    child = started(command(run, words, *LONG))
    log = run / "recurrence" / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0, child)
    second = txl(*command(run, words, *LONG, "--row", "recurrence"))
    assert second.returncode == 1
    assert "recurrence: another process is training there" in second.stderr
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    said = errors.splitlines()
    assert said[0] == "finishing this update; Ctrl-C again ends at once"
    assert said[1].startswith(f"interrupted; go on with: txl sweep table6 --run '{run}' --data ")
    assert checkpoints.load(run / "recurrence" / "last.safetensors").state["step"] >= 2
    assert not (run / "recurrence-shaw").exists()


def test_a_corpus_whose_preparation_was_killed_is_prepared_again(txl: Run, words: Path, tmp_path: Path) -> None:
    half = tmp_path / "s" / "corpus"
    half.mkdir(parents=True)
    (half / ".train.bin.tmp").write_bytes(b"half of it")
    (half / "left.txt").write_text("no text of this sweep\n" * 2000)
    for folder in ("s", "whole"):
        assert txl(*command(tmp_path / folder, words, "--row", ROW)).returncode == 0
    assert_same_row(tmp_path / "s", tmp_path / "whole")


def test_another_sweep_is_refused(txl: Run, words: Path, tmp_path: Path) -> None:
    row = ("--row", "recurrence")
    assert txl(*command(tmp_path / "s", words, *row)).returncode == 0
    for changed, said in (
        (command(tmp_path / "s", words, *row, table="table10"), "table is table10, was table6"),
        (command(tmp_path / "s", words, *row, "--scale", "small"), "scale is small, was tiny"),
        (command(tmp_path / "s", words, *row, "--minutes", 9), "minutes is 9.0, was None"),
    ):
        done = txl(*changed)
        one_line(done, f"{tmp_path / 's' / 'recurrence'}: holds another row: ")
        assert said in done.stderr
    data.prepare(words, tmp_path / "other", data.PrepareOptions("words", max_words=50))
    one_line(txl(*command(tmp_path / "s", tmp_path / "other", *row)), "corpus is ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("table9", "TABLE must be one of table6, table7, table10, got 'table9'"),
        ("table6 --scale huge", "--scale must be one of tiny, small, paper, got 'huge'"),
        ("table6 --row xl", "--row must be one of recurrence, "),
        ("table6 --device cuda:77", "device 'cuda:77' cannot be used"),
        ("table6 --minutes 0", "--minutes must be > 0 and finite, and without --steps, got 0"),
        ("table6 --minutes nan", "--minutes must be > 0 and finite"),
        ("table6 --minutes 1 --steps 2", "without --steps, got 1 and --steps 2"),
        ("table6 --steps 0", "--steps must be >= 1, got 0"),
        ("table6 --eval-tokens -1", "--eval-tokens must be >= 0, got -1"),
        ("table6 --scale paper", "--data must be given at --scale paper"),
        ("table6 --scale tiny --data missing.txt", "missing.txt: no such file or folder"),
        (
            "table7 --scale tiny --data short",
            "--data: row recurrence: the training split has 12 tokens; 14 streams",
        ),
    ],
)
def test_mistakes(txl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").mkdir()
    for split in ("train", "valid", "test"):
        Path("short", f"{split}.txt").write_text("a b\n" * 4)
    one_line(txl("sweep", *options.split(), "--run", "s"), said)
    assert not list(tmp_path.glob("s/*/run.json"))


def test_another_corpus_at_scale_paper_is_said(
    txl: Run, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_run", lambda *_: None)  # weeks
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(words.read_text())
    done = txl("sweep", "table6", "--run", tmp_path / "s", "--data", tmp_path, "--scale", "paper")
    assert done.returncode == 0, done.stderr
    said = "the paper's figures are of wikitext-103 with 267,735 symbols; this corpus is wikitext-103 with 201"
    assert said in done.stdout
    assert "not reproduced" not in done.stdout
