"""A finished run."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import SMALL

from txl.text.corpus import Corpus


@pytest.fixture(scope="session")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "txl", "train", "--run", folder, "--data", corpus.folder, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "validation loss" in done.stdout
    return folder
