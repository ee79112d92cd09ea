"""A finished run."""

import contextlib
import io
from pathlib import Path

import pytest
from command_helpers import SMALL, called
from training_helpers import unlock

from txl.text.corpus import Corpus


@pytest.fixture(scope="session")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert called("train", "--run", folder, "--data", corpus.folder, *SMALL) == 0
    assert "validation loss" in output.getvalue()
    unlock(folder)
    return folder
