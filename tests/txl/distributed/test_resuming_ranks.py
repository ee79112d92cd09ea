"""Checkpoints of several processes: another number goes on, nothing is lost, damage is seen."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import SMALL
from rank_trainings import Trained, go_on
from ranks import children, environment, run_ranks, start_torchrun, torchrun

from txl.distributed import World
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.checkpoint import LAST

PLAIN: dict[str, Any] = {"batch": 8, "steps": 12, "model": {"dropout": 0.0, "attn_dropout": 0.0}, "average": "ema"}


def on_ranks(size: int, run: Path, corpus: Corpus, until: int, work: Path, **case: Any) -> list[Trained]:
    given = {"folder": run, "corpus": corpus.folder, "until": until} | PLAIN | case
    found: list[Trained] = run_ranks("rank_trainings:go_on", size, given, work / "ranks")
    return found


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def test_two_then_one_then_two_processes_train_as_one(corpus: Corpus, tmp_path: Path) -> None:
    """The same streams and memory, parameters, optimizer and average, whoever held which part."""
    whole = go_on(World(), tmp_path / "whole", corpus.folder, 12, **PLAIN)
    run = tmp_path / "run"
    losses = on_ranks(2, run, corpus, 4, tmp_path)[0].losses
    assert [path.name for path in run.glob("last*")] == ["last.safetensors"]
    losses += go_on(World(), run, corpus.folder, 8, **PLAIN | {"batch_chunk": 2}).losses
    last = on_ranks(2, run, corpus, 12, tmp_path)
    torch.testing.assert_close(torch.tensor(losses + last[0].losses), torch.tensor(whole.losses), rtol=1e-9, atol=0)
    assert_close(last[0].parameters, whole.parameters)
    assert_close(last[1].average, whole.average)
    for layer, *parts in zip(whole.memory, *(rank.memory for rank in last), strict=True):
        torch.testing.assert_close(torch.cat(parts), layer, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_as_many_processes_go_on_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    """With dropout: each process's random numbers go on, and are not another's."""
    dropout = {"model": {"dropout": 0.3, "attn_dropout": 0.2}}
    whole = on_ranks(2, tmp_path / "whole", corpus, 8, tmp_path, **dropout)
    first = on_ranks(2, tmp_path / "run", corpus, 3, tmp_path, **dropout)
    rest = on_ranks(2, tmp_path / "run", corpus, 8, tmp_path, **dropout)
    assert first[0].losses + rest[0].losses == whole[0].losses
    assert all(torch.equal(x, whole[0].parameters[name]) for name, x in rest[0].parameters.items())
    saved = checkpoints.load(tmp_path / "run")
    assert not torch.equal(saved.tensors["rng.0.cpu"], saved.tensors["rng.1.cpu"])


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_with_a_line_and_loses_nothing(
    corpus: Corpus, tmp_path: Path, victim: int
) -> None:
    """In a minute; the run goes on with one process from the checkpoint that was written last."""
    run, last = tmp_path / "run", tmp_path / "run" / LAST
    options = [*SMALL, "--steps", 100000, "--save-every", 3, "--eval-every", 100000, "--log-every", 1]
    with start_torchrun(2, "train", "-r", run, "--data", corpus.folder, "--device", "cpu", *options) as process:
        deadline = time.monotonic() + 90
        while not last.exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        rank = children(process.pid)[victim]
        began = time.monotonic()
        subprocess.run(["kill", "-9", str(rank)], check=True)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert f"rank {1 - victim}: another process has ended" in lines[0]
    assert "--resume goes on" in lines[0]
    step = checkpoints.load(last).state["step"]
    assert step >= 3
    done = torchrun(1, "train", "-r", run, "--resume", "--steps", step + 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(last).state["step"] == step + 2


@pytest.mark.slow
def test_ctrl_c_saves_once_and_tells_how_to_go_on(corpus: Corpus, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*SMALL, "--steps", 100000, "--save-every", 100000, "--eval-every", 100000, "--log-every", 1]
    with start_torchrun(2, "train", "-r", run, "--data", corpus.folder, "--device", "cpu", *options) as process:
        deadline = time.monotonic() + 90
        while not (run / "log.jsonl").exists() or not (run / "log.jsonl").stat().st_size:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    told = [line for line in errors.splitlines() if line.startswith(("interrupted: ", "go on with: ", "finishing"))]
    assert [line.split(":")[0].split(" this")[0] for line in told] == ["finishing", "interrupted", "go on with"]
    assert told[2] == f"go on with: torchrun --nproc-per-node 2 -m txl train -r {run} --resume --device cpu"
    step = checkpoints.load(run / LAST).state["step"]
    again = told[2].removeprefix("go on with: torchrun ").split()
    command = [sys.executable, "-m", "torch.distributed.run", *again, "--steps", str(step + 1)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(run / LAST).state["step"] == step + 1
