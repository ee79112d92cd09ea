"""The curve of a run: drawn from any log, missed by none."""

import json
import sys
from pathlib import Path

import pytest
from command_helpers import SMALL, Run
from training_helpers import trainer

from txl import pictures
from txl.commands.train import draw_loss
from txl.text.corpus import Corpus
from txl.training.run import read_log


def test_train_draws_its_loss(run: Path) -> None:
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_train_without_matplotlib(txl: Run, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *_, finished, left_out = done.stdout.splitlines()
    assert finished == f"done: {tmp_path / 'r' / 'last.safetensors'}"
    assert left_out.startswith("loss.png was left out: matplotlib cannot be used")
    assert left_out.endswith('pip install "txl-kernels[plots]"')
    assert not (tmp_path / "r" / "loss.png").exists()


@pytest.mark.parametrize("unit", ["bpc", "ppl"])
@pytest.mark.parametrize("log", ["nothing", "not finite", "damaged", "training only"])
def test_any_log_can_be_drawn(tmp_path: Path, log: str, unit: str) -> None:
    entries = {
        "nothing": [],
        "not finite": [{"step": n, "bpc": float("inf"), "ppl": float("inf")} for n in range(9)],
        "damaged": [{"step": n, "bpc": "1", "ppl": None, "valid_bpc": 10**400} for n in range(9)],
        "training only": [{"step": n, "bpc": 1.0, "ppl": 2.0} for n in range(9)],
    }[log]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = read_log(tmp_path / "log.jsonl")
    pictures.draw_loss(found, tmp_path / "loss.png", unit)
    assert (tmp_path / "loss.png").exists()


def test_a_picture_that_cannot_be_written_ends_nothing(corpus: Corpus, tmp_path: Path) -> None:
    t = trainer(tmp_path, corpus)
    (tmp_path / "loss.png").mkdir()
    assert "loss.png" in str(draw_loss(t))
