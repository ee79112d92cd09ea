"""The `txl` command, and a finished run."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import SMALL, Run, in_process

from txl.commands.console import console
from txl.text.corpus import Corpus


@pytest.fixture
def txl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(console, "width", 120)
    return functools.partial(in_process, capfd)


@pytest.fixture(scope="session")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "txl", "train", "--run", folder, "--data", corpus.folder, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "validation loss" in done.stdout
    return folder
