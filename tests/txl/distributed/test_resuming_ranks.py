"""Checkpoints of several processes: resumed by any number of them, after kills and Ctrl-C."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import SMALL, Run, succeeded
from rank_functions import Trained, go_on
from ranks import children, environment, run_ranks, start_torchrun

from txl.distributed import World
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.checkpoint import LAST

PLAIN: dict[str, Any] = {"batch": 8, "steps": 12, "model": {"dropout": 0.0, "attn_dropout": 0.0}, "average": "ema"}


def on_two_ranks(run: Path, corpus: Corpus, until: int, **case: Any) -> list[Trained]:
    return run_ranks(go_on, 2, folder=run, corpus=corpus.folder, until=until, **PLAIN | case)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_two_then_one_then_two_processes_train_as_one(corpus: Corpus, tmp_path: Path) -> None:
    """Streams, memory, parameters, optimizer and average do not depend on who held which part."""
    whole = go_on(World(), tmp_path / "whole", corpus.folder, 12, **PLAIN)
    run = tmp_path / "run"
    losses = on_two_ranks(run, corpus, 4)[0].losses
    assert [path.name for path in run.glob("last*")] == ["last.safetensors"]
    losses += go_on(World(), run, corpus.folder, 8, **PLAIN | {"batch_chunk": 2}).losses
    last = on_two_ranks(run, corpus, 12)
    torch.testing.assert_close(torch.tensor(losses + last[0].losses), torch.tensor(whole.losses), rtol=1e-9, atol=0)
    assert_close(last[0].parameters, whole.parameters)
    assert_close(last[1].average, whole.average)
    for layer, *parts in zip(whole.memory, *(rank.memory for rank in last), strict=True):
        torch.testing.assert_close(torch.cat(parts), layer, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_same_number_of_processes_resumes_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    """With dropout: each process keeps its own random generator."""
    dropout = {"model": {"dropout": 0.3, "attn_dropout": 0.2}}
    whole = on_two_ranks(tmp_path / "whole", corpus, 8, **dropout)
    first = on_two_ranks(tmp_path / "run", corpus, 3, **dropout)
    rest = on_two_ranks(tmp_path / "run", corpus, 8, **dropout)
    assert first[0].losses + rest[0].losses == whole[0].losses
    assert all(torch.equal(x, whole[0].parameters[name]) for name, x in rest[0].parameters.items())
    saved = checkpoints.load(tmp_path / "run")
    assert not torch.equal(saved.tensors["rng.0.cpu"], saved.tensors["rng.1.cpu"])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_others_and_loses_no_checkpoint(
    txl: Run, corpus: Corpus, tmp_path: Path, victim: int
) -> None:
    """Within a minute, with one error line; one process resumes from the last checkpoint."""
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
    succeeded(txl("train", "-r", run, "--resume", "--steps", step + 2, "--device", "cpu"))
    assert checkpoints.load(last).state["step"] == step + 2


@pytest.mark.slow
def test_ctrl_c_saves_once_and_prints_how_to_resume(corpus: Corpus, tmp_path: Path) -> None:
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
    printed = [line for line in errors.splitlines() if line.startswith(("interrupted: ", "go on with: ", "finishing"))]
    assert [line.split(":")[0].split(" this")[0] for line in printed] == ["finishing", "interrupted", "go on with"]
    assert printed[2] == f"go on with: torchrun --nproc-per-node 2 -m txl train -r {run} --resume --device cpu"
    step = checkpoints.load(run / LAST).state["step"]
    again = printed[2].removeprefix("go on with: torchrun ").split()
    command = [sys.executable, "-m", "torch.distributed.run", *again, "--steps", str(step + 1)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert checkpoints.load(run / LAST).state["step"] == step + 1
