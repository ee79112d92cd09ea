"""`txl sweep` as a user runs it: tables, devices, Ctrl-C, kills, and what it refuses."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import Run, one_line
from training_helpers import assert_same_run

from txl.errors import TxlError
from txl.sweeps import sweep
from txl.text import corpus as data
from txl.training import checkpoint as checkpoints
from txl.training.lock import lock, unlock

LONG = "--steps", "100000"
TABLE7 = ["recurrence", "recurrence-shaw", "no-recurrence"]


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


def is_free(folder: Path) -> bool:
    """Whether no process trains there."""
    try:
        lock(folder)
    except TxlError:
        return False
    unlock(folder)
    return True


def test_a_table_on_two_devices_a_row_of_which_fails(txl: Run, words: Path, tmp_path: Path) -> None:
    """The others go on; mended, the same command does what is left, and then nothing."""
    folder = tmp_path / "s"
    assert txl(*command(folder, words, "--rows", "recurrence", table="table7")).returncode == 0
    broken = folder / "no-recurrence"
    broken.mkdir()
    (broken / "last.safetensors").write_text("not a checkpoint")
    arguments = command(folder, words, "--devices", "cpu,cpu", table="table7")
    done = txl(*arguments)
    assert done.returncode == 1
    failed, summary = done.stderr.splitlines()
    assert failed.startswith(f"no-recurrence failed: {broken / 'last.safetensors'}: not a whole safetensors file")
    assert summary == "error: 1 of 3 rows failed: no-recurrence; the same command tries them again"
    assert "[cpu] recurrence-shaw: step 8: validation loss" in done.stdout
    assert "recurrence-shaw: done" in done.stdout
    rows = json.loads((folder / "table7.json").read_text())["rows"]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed"]
    assert rows[2]["error"] == failed.removeprefix("no-recurrence failed: ")

    (broken / "last.safetensors").unlink()
    done = txl(*arguments)
    assert done.returncode == 0, done.stderr
    assert "recurrence-shaw: Transformer" not in done.stdout
    check_record(folder)
    alone = txl(*command(tmp_path / "alone", words, table="table7"))
    assert alone.returncode == 0, alone.stderr
    for name in TABLE7:
        assert_same_run(folder / name, tmp_path / "alone" / name)
    shown = done.stdout[done.stdout.index("Table 7") : done.stdout.index("in /")]
    again = txl(*arguments)
    assert shown in again.stdout
    assert "scale tiny: models, lengths and text are not the paper's: its figures are not reproduced here" in shown
    assert "step" not in again.stdout


def check_record(folder: Path) -> None:
    """The two files of a finished Table 7."""
    record = json.loads((folder / "table7.json").read_text())
    assert [row["name"] for row in record["rows"]] == TABLE7
    assert record["settings"]["corpus"] == data.load(folder / "corpus").fingerprint
    assert {"versions", "machine", "date", "note"} < set(record)
    for row in record["rows"]:
        assert row["state"] == "finished"
        scored = {score["attn_len"]: score["ppl"] for score in row["scores"]}
        for what in ("init", "best", "shortest"):
            assert scored[row[what]["attn_len"]] == row[what]["ppl"]
        assert row["best"]["ppl"] == min(scored.values())
        assert row["init"]["attn_len"] == row["model"]["mem_len"] + row["train"]["tgt_len"]
        assert row["threads"] >= 1
        assert row["seconds"]["train"] > 0
    with (folder / "table7.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["row"] for line in lines] == TABLE7
    assert [float(line["best"]) for line in lines] == [row["best"]["ppl"] for row in record["rows"]]
    assert [line["paper_best"] for line in lines] == ["25.2", "25.7", "27.1"]


def test_some_rows_and_then_the_others(txl: Run, words: Path, tmp_path: Path) -> None:
    done = txl(*command(tmp_path, words, "--rows", "151m"))
    assert done.returncode == 0, done.stderr
    assert "151m: Transformer-XL, 1 layers x 18, " in done.stdout
    assert "at attention length 36; the paper's 23.35 at 300" in done.stdout
    assert "at attention length 54; the paper's 23.16 at 450" in done.stdout
    assert done.stdout.count("waiting") == 9
    done = txl(
        "sweep", "table6", "--run", tmp_path, "--scale", "tiny", "--eval-tokens", 128, "--rows", "al-rfou-half,151m"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("waiting") == 8
    assert "151m: Transformer-XL" not in done.stdout


def test_a_row_that_fails_on_one_device(txl: Run, words: Path, tmp_path: Path) -> None:
    assert txl(*command(tmp_path, words, "--rows", "recurrence")).returncode == 0
    (tmp_path / "no-recurrence").mkdir()
    (tmp_path / "no-recurrence" / "last.safetensors").write_text("not a checkpoint")
    done = txl(*command(tmp_path, words, "--rows", "no-recurrence,vaswani-half"))
    assert done.returncode == 1
    assert done.stderr.startswith("no-recurrence failed: ")
    assert done.stderr.endswith("error: 1 of 2 rows failed: no-recurrence; the same command tries them again\n")
    assert "vaswani-half: done" in done.stdout


def test_kill_9_and_the_same_command(txl: Run, words: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path / "s", words, "--rows", "recurrence", "--steps", "240")
    child = started(arguments)
    wait_for((tmp_path / "s" / "recurrence" / "last.safetensors").exists, child)
    child.kill()
    child.communicate()
    step = checkpoints.load(tmp_path / "s" / "recurrence" / "last.safetensors").state["step"]
    assert step < 240
    for folder in ("s", "whole"):
        done = txl(*command(tmp_path / folder, words, "--rows", "recurrence", "--steps", "240"))
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "s" / "recurrence", tmp_path / "whole" / "recurrence")


def test_ctrl_c_and_a_second_sweep(txl: Run, words: Path, tmp_path: Path) -> None:
    """On one device: the checkpoint is written, and meanwhile the folder is refused to others."""
    run = tmp_path / "a sweep"
    child = started(command(run, words, *LONG))
    log = run / "recurrence" / "log.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size > 0, child)
    one_line(txl(*command(run, words, *LONG)), f"{run}: another process ({child.pid}) is training there")
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    said = errors.splitlines()
    assert said[0] == "finishing this update; Ctrl-C again ends at once"
    assert said[1].startswith(f"interrupted; go on with: txl sweep table6 --run '{run}' --data ")
    assert checkpoints.load(run / "recurrence" / "last.safetensors").state["step"] >= 2
    assert not (run / "recurrence-shaw").exists()


def test_ctrl_c_and_a_kill_on_two_devices(words: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path, words, *LONG, "--devices", "cpu,cpu", "--rows", "recurrence,vaswani-half,151m")
    running = [tmp_path / name for name in ("recurrence", "vaswani-half")]

    def logged(size: int) -> bool:
        return all((row / "log.jsonl").exists() and (row / "log.jsonl").stat().st_size > size for row in running)

    child = started(arguments)
    wait_for(lambda: logged(0), child)
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert errors.splitlines()[0] == "finishing the updates in progress; Ctrl-C again ends at once"
    assert errors.splitlines()[1].startswith("interrupted; go on with: txl sweep table6 --run ")
    first = [checkpoints.load(row / "last.safetensors").state["step"] for row in running]
    assert min(first) >= 2
    assert not (tmp_path / "151m").exists()

    most = max((row / "log.jsonl").stat().st_size for row in running)
    child = started(arguments)  # goes on from there, and its rows end with it when it is killed
    wait_for(lambda: logged(most), child)
    assert not any(is_free(row) for row in running)
    child.kill()
    child.communicate(timeout=60)
    wait_for(lambda: all(is_free(row) for row in running))
    entries = [json.loads((row / "log.jsonl").read_text().splitlines()[-1]) for row in running]
    assert all(entry["step"] > step for entry, step in zip(entries, first, strict=True))


def test_another_sweep_is_refused_and_keeps_its_text(txl: Run, words: Path, tmp_path: Path) -> None:
    rows = ("--rows", "recurrence")
    assert txl(*command(tmp_path / "s", words, *rows)).returncode == 0
    prepared = (tmp_path / "s" / "corpus" / "train.bin").read_bytes()
    (tmp_path / "other.txt").write_text("another text\n" * 2000)
    for changed, said in (
        (command(tmp_path / "s", words, *rows, table="table10"), "table is table10, was table6"),
        (command(tmp_path / "s", words, *rows, "--scale", "small"), "scale is small, was tiny"),
        (command(tmp_path / "s", words, *rows, "--steps", 9), "steps is 9, was None"),
        (command(tmp_path / "s", tmp_path / "other.txt", *rows), "corpus is "),
    ):
        done = txl(*changed)
        one_line(done, f"{tmp_path / 's'}: holds another sweep: ")
        assert said in done.stderr
    assert (tmp_path / "s" / "corpus" / "train.bin").read_bytes() == prepared
    assert not (tmp_path / "s" / ".corpus-again").exists()
    assert txl(*command(tmp_path / "s", words, *rows)).returncode == 0
    (tmp_path / "s" / "sweep.json").write_text("{")
    one_line(txl(*command(tmp_path / "s", words, *rows)), "sweep.json: no ledger that can be read")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("table9", "TABLE must be one of table6, table7, table10, got 'table9'"),
        ("table6 --scale huge", "--scale must be one of tiny, small, paper, got 'huge'"),
        ("table6 --rows recurrence,xl", "--rows takes names of table6 separated by commas (recurrence, "),
        (
            "table6 --devices cpu,tpu",
            "--devices takes auto, cpu, cuda or cuda:N, several separated by commas, got 'cpu,tpu'",
        ),
        ("table6 --devices cpu,cuda:77", "got 'cpu,cuda:77': device 'cuda:77' cannot be used"),
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
    monkeypatch.setattr(sweep, "_run_rows", lambda *_: {})  # weeks
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(words.read_text())
    done = txl("sweep", "table6", "--run", tmp_path / "s", "--data", tmp_path, "--scale", "paper")
    assert done.returncode == 0, done.stderr
    said = "the paper's figures are of wikitext-103 with 267,735 symbols; this corpus is wikitext-103 with 201"
    assert said in done.stdout
    assert "not reproduced" not in done.stdout
