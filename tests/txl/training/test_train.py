"""Training: the loss falls, a run resumes bit for bit and stops on errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest
import torch
from default_device import default_dtype
from training_helpers import assert_same_run, contents, trainer

from txl.errors import TxlError
from txl.text.corpus import Corpus, prepare
from txl.training import checkpoint as checkpoints
from txl.training.run import read_record, refuse_used_folder
from txl.training.trainer import Trainer


def test_learns(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=120, lr=1e-2, model={"dropout": 0.0, "attn_dropout": 0.0})
    t.run()
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [e["loss"] for e in entries if "loss" in e]
    assert losses[0] > 3.0
    assert sum(losses[-10:]) / 10 < 1.6
    assert t.best_loss < 1.7
    assert checkpoints.load(t.best).state["step"] > 60


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_resumed_run_is_bit_exact_at_any_alignment_of_the_file(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, padding: int, chunks: int
) -> None:
    """A header has any length; products of float64 round differently at another alignment."""
    write = checkpoints.write_tensors

    def padded(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
        write(file, tensors, metadata | {"padding": padding * "x"})

    with default_dtype(torch.float64):
        straight = trainer(tmp_path / "straight", corpus, batch_chunk=chunks)
        straight.advance(8)
        straight.save()
        half = trainer(tmp_path / "half", corpus, batch_chunk=chunks)
        half.advance(3)
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "write_tensors", padded)
            half.save()
        resumed = trainer(tmp_path / "half", corpus, resume=True, batch_chunk=chunks)
        resumed.advance(5)
        resumed.save()
    assert_same_run(tmp_path / "straight", tmp_path / "half")


def test_nan_stops_and_leaves_the_last_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus)
    t.advance(3)
    t.save()
    with torch.no_grad():
        t.model.softmax.bias[0] = torch.nan
    with pytest.raises(TxlError, match="the loss became nan at step 4; the run's last checkpoint"):
        t.run()
    assert all(x.isfinite().all() for x in contents(tmp_path).values() if x.is_floating_point())


def test_resume_refuses_another_text(tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path / "run", corpus).save()
    text = tmp_path / "other.txt"
    text.write_bytes(corpus.vocabulary.symbols * 100)
    other = prepare(text, tmp_path / "other")
    assert other.vocabulary == corpus.vocabulary
    with pytest.raises(TxlError, match="cannot resume on another text"):
        trainer(tmp_path / "run", other, resume=True)


def test_best_checkpoint_cannot_be_resumed(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=1, eval_every=1)
    t.run()
    t.best.replace(t.last)
    with pytest.raises(TxlError, match="holds parameters only"):
        trainer(tmp_path, corpus, resume=True, steps=1, eval_every=1)


def test_run_can_be_moved(tmp_path: Path, text: Path) -> None:
    inside = prepare(text, tmp_path / "a" / "corpus")
    trainer(tmp_path / "a", inside).save()
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_record(tmp_path / "b").corpus == tmp_path / "b" / "corpus"
    with pytest.raises(TxlError, match="holds no run"):
        read_record(tmp_path / "a")


def test_paths_may_be_strings(tmp_path: Path, corpus: Corpus) -> None:
    trainer(str(tmp_path / "run"), corpus).save()
    assert read_record(str(tmp_path / "run")).train["steps"] == 20
    assert trainer(str(tmp_path / "run"), corpus, resume=True).last == tmp_path / "run" / "last.safetensors"
    with pytest.raises(TxlError, match="already holds a run"):
        refuse_used_folder(str(tmp_path / "run"))


def test_tensorboard_log(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=2)
    t = Trainer(tmp_path / "b", corpus, t.model.config, t.config, tensorboard=True)
    t.run()
    assert list((tmp_path / "b").glob("events.out.tfevents.*"))
