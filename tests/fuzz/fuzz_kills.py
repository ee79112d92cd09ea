"""kill -9 at any moment of preparing and training: the corpus is whole or not there, and the run,
taken up again as often as it is killed, ends with the same bits."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import commands

from txl.text import corpus as corpora

STEPS = ("--steps", "60", "--save-every", "1", "--eval-every", "7")


def prepare(folder: Path) -> None:
    commands.prepare(folder)
    done = _start(folder, "train", "--run", folder / "whole", "--data", folder / "corpus", *commands.TRAIN, *STEPS)
    done.wait()
    assert done.returncode == 0


def attempt(random: Random, folder: Path) -> None:
    if random.random() < 0.7:
        _training(random, folder)
    else:
        _preparation(random, folder)


def _training(random: Random, folder: Path) -> None:
    run = folder / "killed"
    fresh = ("train", "--run", run, "--data", folder / "corpus", *commands.TRAIN, *STEPS)
    resumed = ("train", "--run", run, "--resume")
    kills = random.choice((1, 2, 3))
    for _ in range(kills):
        _killed(random, run, _start(folder, *(resumed if (run / "last.safetensors").exists() else fresh)))
        if not (run / "last.safetensors").exists() and run.exists():
            shutil.rmtree(run)  # nothing was promised yet
    last = _start(folder, *(resumed if run.exists() else fresh))
    errors = last.communicate()[1].decode()
    assert last.returncode == 0, f"after {kills} kills: {errors}"
    for name in ("last.safetensors", "best.safetensors"):
        same = (folder / "whole" / name).read_bytes() == (run / name).read_bytes()
        assert same, f"after {kills} kills: {name} differs"
    left = [x.name for x in run.iterdir() if x.name.endswith(".tmp")]
    assert not left, left
    shutil.rmtree(run)


def _preparation(random: Random, folder: Path) -> None:
    out = folder / "prepared"
    text = folder / "big.txt"
    text.write_bytes(b"another text altogether\n" * 400_000)
    _killed(random, folder, _start(folder, "prepare", out, "--data", text))
    if not out.exists():
        corpora.prepare(text, out)
    after = corpora.load(out)
    after.verify()
    assert len(after.train) > 8_000_000
    assert not [*folder.glob(".prepared.*")]
    shutil.rmtree(out)


def _start(folder: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "txl", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _killed(random: Random, folder: Path, child: subprocess.Popen[bytes]) -> None:
    """Some moment after it began to write, most often while it still writes."""
    marks = {x.name for x in folder.iterdir()} if folder.exists() else set()
    for _ in range(2000):
        if child.poll() is not None or (folder.exists() and {x.name for x in folder.iterdir()} != marks):
            break
        time.sleep(0.01)
    time.sleep(random.choice((0, 0.003, 0.03, 0.3)) * random.random() * 3)
    child.send_signal(signal.SIGKILL)
    child.communicate()
