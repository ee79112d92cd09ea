"""Rows of a sweep dealt to processes: the same table, and what is left when one stops or dies."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_commands import ended, run_commands, started_ranks
from ranks import children, run_ranks, start_torchrun, torchrun
from training_helpers import assert_same_run

from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
from txl.training import checkpoint as checkpoints

ROWS = ["recurrence", "recurrence-shaw", "no-recurrence"]
LONG = "--steps", "100000"


def test_the_first_free_rank_takes_the_next_task(tmp_path: Path) -> None:
    first, second = run_ranks("rank_tasks:work", 2, {}, tmp_path)
    assert sorted(first["taken"] + second["taken"]) == list(range(6))
    assert len(first["taken"]) < len(second["taken"])
    for rank in (first, second):
        assert rank["failures"] == {5: "no good, ä"}
        assert rank["stopped"] is None
        assert rank["none"] == ([], {})


@pytest.mark.parametrize(
    ("victim", "number", "words"),
    [
        (0, signal.SIGKILL, "rank 1: the first process has ended"),
        (1, signal.SIGKILL, "rank 0: rank 1 has ended or does not answer"),
        (1, signal.SIGSTOP, "rank 0: rank 1 has ended or does not answer"),  # as if its machine were gone
    ],
)
def test_a_lost_rank_is_missed(victim: int, number: int, words: str, tmp_path: Path) -> None:
    """Without torchrun, which would end the others."""
    given = {"victim": victim, "number": number, "said": tmp_path / "said"}
    with pytest.raises(AssertionError, match=r"exit code -9|not done"):
        run_ranks("rank_tasks:lose", 2, given, tmp_path, timeout=10)
    assert (tmp_path / "said").read_text().startswith(words)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [" ".join(f"w{(n * n + 7 * k) % 200}" for k in range(24)) for n in range(480)]
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.txt").write_text("\n".join(lines) + "\n")
    data.prepare(folder / "words.txt", folder / "corpus", PrepareOptions("words"))
    return folder / "corpus"


def command(folder: Path, words: Path, *more: object) -> list[object]:
    return ["sweep", "table7", "-r", folder, "--data", words, "--scale", "tiny", "--eval-tokens", 128, *more]


def result(folder: Path) -> dict[str, Any]:
    """The JSON but for times, machine and devices."""
    record: dict[str, Any] = json.loads((folder / "table7.json").read_text())
    for name in ("date", "machine"):
        del record[name]
    for row in record["rows"]:
        for name in ("seconds", "finished", "device", "threads"):
            del row[name]
        for score in row["scores"]:
            del score["seconds"]
    return record


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_a_failed_row_and_then_the_table_of_one_process(words: Path, tmp_path: Path) -> None:
    """The others go on; mended, any number of processes does what is left."""
    folder = tmp_path / "s"
    broken = folder / "recurrence-shaw"
    begun = run_commands(command(folder, words, "--rows", "recurrence"))[0]
    assert begun.returncode == 0, begun.stderr
    broken.mkdir()
    (broken / "last.safetensors").write_text("not a checkpoint")
    done = torchrun(2, *command(folder, words))
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "fail" in line and "recurrence-shaw" in line]
    assert len(said) == 2, done.stderr
    assert said[0].split("] ")[1].startswith(f"recurrence-shaw failed: {broken / 'last.safetensors'}: not a whole")
    assert said[1] == "error: 1 of 3 rows failed: recurrence-shaw; the same command tries them again"
    assert done.stdout.count("Table 7") == 1
    assert "no-recurrence: done" in done.stdout
    assert [row["state"] for row in result(folder)["rows"]] == ["finished", "failed", "finished"]

    (broken / "last.safetensors").unlink()
    mended, alone = torchrun(2, *command(folder, words)), run_commands(command(tmp_path / "alone", words))[0]
    assert mended.returncode == alone.returncode == 0, (mended.stderr, alone.stderr)
    assert result(folder) == result(tmp_path / "alone")
    assert (folder / "table7.csv").read_text() == (tmp_path / "alone" / "table7.csv").read_text()
    for name in ROWS:
        assert_same_run(folder / name, tmp_path / "alone" / name)


def test_mistakes_are_said_once(words: Path, tmp_path: Path) -> None:
    cases = [
        (("--devices", "cpu,cpu"), "--devices must be one where torchrun gives each process its rows, got 'cpu,cpu'"),
        (("--data", tmp_path / "nowhere"), "nowhere: no such file or folder"),
    ]
    for options, said in cases:
        done = run_commands(*[command(tmp_path / "s", words, *options)] * 2)
        assert [each.returncode for each in done] == [1, 1]
        errors = [line for each in done for line in each.stderr.splitlines()]
        assert len(errors) == 1, errors
        assert said in errors[0]


@pytest.mark.slow
def test_ctrl_c_to_one_stops_all_and_a_killed_rank_is_gone_on_with(words: Path, tmp_path: Path) -> None:
    arguments = command(tmp_path, words, *LONG, "--rows", "recurrence,recurrence-shaw")
    logs = [tmp_path / name / "log.jsonl" for name in ROWS[:2]]

    def logged(more_than: int) -> bool:
        return all(log.exists() and log.stat().st_size > more_than for log in logs)

    def step(name: str) -> int:
        return int(checkpoints.load(tmp_path / name / "last.safetensors").state["step"])

    with started_ranks(arguments, arguments) as processes:
        wait_for(lambda: logged(0))
        processes[1].send_signal(signal.SIGINT)
        first, second = ended(processes, 60)
    assert (first.returncode, second.returncode) == (130, 130), (first, second)
    assert "interrupted; the same command goes on" in first.stderr
    assert "interrupted, to go on from its last checkpoint" in second.stderr
    assert "Table 7" not in first.stdout
    before = {name: step(name) for name in ROWS[:2]}
    assert min(before.values()) >= 2

    size = max(log.stat().st_size for log in logs)
    with start_torchrun(2, *arguments) as process:  # goes on; killed, its peer writes its checkpoint
        wait_for(lambda: logged(size))
        lost = children(process.pid)[1]
        os.kill(lost, signal.SIGKILL)
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted, to go on from its last checkpoint" in errors
    assert time.monotonic() - began < 60
    assert any(step(name) > before[name] for name in before)
    assert all(step(name) >= before[name] for name in before)
