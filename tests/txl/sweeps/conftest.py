"""A corpus of words, and sweeps of it at scale tiny in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from txl.sweeps import sweep, tables
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.text.datasets import PrepareOptions

RunSweep = Callable[..., None]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """12,000 words of 203."""
    lines = [" ".join(f"w{(n * n + 7 * k) % 200}" for k in range(24)) for n in range(480)]
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(lines) + "\n")
    return data.prepare(path, tmp_path_factory.mktemp("words-corpus"), PrepareOptions("words"))


@pytest.fixture
def run_sweep(words: Corpus) -> RunSweep:
    def run(folder: Path, rows: str, table: str = "table6", **settings: Any) -> None:
        asked = {"scale": "tiny", "minutes": None, "steps": None, "eval_tokens": 128} | settings
        found = tables.find(table)
        sweep.run(folder, found, found.chosen(rows), words.folder, asked, [torch.device("cpu")])

    return run
