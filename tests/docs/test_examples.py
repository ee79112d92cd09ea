"""The scripts in examples/ call commands as they are."""

import os
import subprocess
from pathlib import Path

import pytest
from command_helpers import in_process

from txl.text import corpus as data

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--n-layer 1 --d-model 16 --n-head 1 --d-head 16 --d-inner 16 --batch 2 --cutoffs 20,60".split()


def test_paper_systems(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it would run, recorded by a command of the same name, runs on smaller models."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n % 97} says {n * 7 % 89} and no more\n" for n in range(400)))
    corpus = data.prepare(text, tmp_path / "corpus", data.PrepareOptions("words"))
    stub = tmp_path / "bin" / "txl"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}
    command = ["bash", EXAMPLES / "paper_systems.sh", corpus.folder, tmp_path / "runs", "0.0005"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == 18
    for call in calls:
        done = in_process(capfd, *call, *(TINY if call[0] == "train" else ["--limit", "100"]))
        assert done.returncode == 0, (call, done.stderr)
