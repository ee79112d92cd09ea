"""Ctrl-C and SIGTERM while a model trains."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_helpers import SMALL, Run, succeeded
from training_helpers import trainer

from txl.commands.train import stop_on_ctrl_c
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints

FINISHING = "finishing this update; Ctrl-C again ends at once"


# Variables that torchrun --nproc-per-node 1 sets; port 0 is any free one.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def started(folder: Path, corpus: Corpus, *more: str, **environment: str) -> "subprocess.Popen[str]":
    """A long training whose log has begun."""
    options = ["--steps", "1000000", "--save-every", "1000000", "--eval-every", "1000000", "--device", "cpu", *more]
    child = subprocess.Popen(
        [sys.executable, "-m", "txl", "train", "--run", folder, "--data", corpus.folder, *SMALL, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run where it is ignored
    )  # fmt: skip
    end = threading.Timer(120, child.kill)  # ends a test that would hang
    end.daemon = True
    end.start()
    log, deadline = folder / "log.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size):
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    assert log.stat().st_size, "no update was logged in a minute"
    return child


@pytest.mark.parametrize(
    ("received", "environment"),
    [
        (signal.SIGINT, {}),
        pytest.param(signal.SIGTERM, {}, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ALONE, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM, torchrun"],
)
def test_signal_writes_a_checkpoint_and_prints_how_to_resume(
    txl: Run, corpus: Corpus, tmp_path: Path, received: signal.Signals, environment: dict[str, str]
) -> None:
    run = tmp_path / "a run"
    child = started(run, corpus, **environment)
    os.kill(child.pid, received)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    step = checkpoints.load(run / "last.safetensors").state["step"]
    assert step >= 10
    finishing, interrupted, way_on = errors.splitlines()
    assert finishing == FINISHING
    assert interrupted == f"interrupted: {step:,} of 1,000,000 updates are in {run / 'last.safetensors'}"
    assert way_on == f"go on with: txl train -r '{run}' --resume --device cpu"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    command = shlex.split(way_on.removeprefix("go on with: "))[1:]
    succeeded(txl(*command, "--steps", step + 1))
    assert checkpoints.load(run / "last.safetensors").state["step"] == step + 1


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once(corpus: Corpus, tmp_path: Path) -> None:
    # Updates take long.
    child = started(tmp_path / "r", corpus, "--accumulate", "100", "--log-every", "1")
    os.kill(child.pid, signal.SIGINT)
    assert child.stderr.readline().strip() == FINISHING
    os.kill(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.strip() == "interrupted"
    assert not (tmp_path / "r" / "last.safetensors").exists()


def test_ignored_ctrl_c_stays_ignored(corpus: Corpus, tmp_path: Path) -> None:
    """`nohup`, or a script's background job."""
    trained = trainer(tmp_path / "run", corpus, steps=2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_ctrl_c(trained):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not trained.stop_requested


@pytest.mark.slow
def test_ctrl_c_with_closed_outputs(corpus: Corpus, tmp_path: Path) -> None:
    """`txl train 2>&1 | tee log`, where tee ends by the same Ctrl-C, or before it."""
    child = started(tmp_path / "r", corpus, "--log-every", "1")
    child.stdout.close()
    child.stderr.close()
    log = tmp_path / "r" / "log.jsonl"
    lines = log.read_text().count("\n") + 3
    while log.read_text().count("\n") < lines and child.poll() is None:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(timeout=60) == 130
    assert (tmp_path / "r" / "loss.png").exists()


def test_ctrl_c_of_another_command(txl: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("txl.language_model.generate", interrupted)
    done = txl("generate", run)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
