"""Runs in folders that other processes use, and on damaged files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from training_helpers import trainer, unlock

import txl
from txl.errors import TxlError
from txl.importing import pickles
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.run import read_log, read_record
from txl.training.trainer import Trainer


@pytest.fixture
def finished(tmp_path: Path, corpus: Corpus) -> Path:
    trainer(tmp_path / "run", corpus, steps=6, save_every=3, eval_every=6).run()
    return tmp_path / "run"


@pytest.mark.slow
def test_folder_made_again_is_locked(tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path / "run", corpus, steps=6)
    shutil.rmtree(tmp_path / "run")
    trainer(tmp_path / "run", corpus, steps=6)
    lock = "import pathlib, sys; from txl.training import run; run.lock(pathlib.Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", lock, tmp_path / "run"], capture_output=True, text=True)
    assert "another process is training there" in other.stderr


def test_damaged_log_stops_no_run(finished: Path, corpus: Corpus) -> None:
    """Lines that can be read are kept."""
    good = json.dumps({"step": 3, "loss": 1.0}).encode()
    (finished / "log.jsonl").write_bytes(b"\0\xff\n5\n{}\n" + b"[" * 100_000 + b"\n" + good + b'\n{"step": 5, "lo')
    trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6).run()
    entries = read_log(finished / "log.jsonl")
    assert len(entries) == (finished / "log.jsonl").read_bytes().count(b"\n")
    assert entries[0] == {"step": 3, "loss": 1.0}
    assert entries[-1]["step"] == 8


def test_a_missing_log(finished: Path, corpus: Corpus) -> None:
    (finished / "log.jsonl").unlink()
    trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6).run()


def rewritten(path: Path, change: object) -> None:
    """Change a checkpoint's header and tensors, with a right checksum."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["txl"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    text = json.dumps(header)
    save_file(tensors, path, metadata={"txl": text, "sha256": checkpoints._digest(text, tensors)})


FORGED: list[tuple[str, object]] = [
    ("config.n_layer", 10**9), ("state.best_loss", float("nan")), ("state.train", {"steps": "6"}),
    ("vocabulary.dropped", [300]), ("format", 2),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FORGED, ids=lambda value: repr(value)[:20])
def test_forged_header_is_reported_by_field(finished: Path, field: str, value: object) -> None:
    def forge(header: dict, tensors: dict) -> None:
        *path, last = field.split(".")
        for name in path:
            header = header[name]
        header[last] = value

    rewritten(finished / "best.safetensors", forge)
    with pytest.raises(TxlError, match=r"best\.safetensors: (the checkpoint is damaged: |checkpoint format)") as raised:
        txl.load(finished)
    assert field.rsplit(".", 1)[-1] in str(raised.value) or "steps" in str(raised.value)


def test_forged_sizes_allocate_nothing(finished: Path) -> None:
    rewritten(finished / "best.safetensors", lambda header, tensors: header["config"].update(d_model=2_000_000_000))
    with pytest.raises(TxlError, match=r"best\.safetensors: .* has shape \[.*\], the configuration needs"):
        checkpoints.restore(finished)


TENSORS = {
    "memory.0": ("memory", None, torch.zeros(1), torch.zeros(2, 4, 24, 16, dtype=torch.int64)),
    "rng.0.cpu": ("RNG", torch.zeros(4)),
    "optimizer.0.0.exp_avg": (r"0\.exp_avg", None, torch.zeros(2)),
    "average.softmax.bias": (r"softmax\.bias", None, torch.zeros(1)),
    "average_count": ("average_count", None, torch.zeros(2), torch.tensor(-1)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_forged_tensors_are_reported_and_nothing_is_written(tmp_path: Path, corpus: Corpus, name: str) -> None:
    """A shape that could be broadcast is refused, too."""
    run = trainer(tmp_path, corpus, average="ema")
    run.advance(2)
    run.save()
    whole = run.last.read_bytes()
    word, *forgeries = TENSORS[name]
    for forged in forgeries:
        unlock(tmp_path)
        run.last.write_bytes(whole)

        def forge(header: dict, tensors: dict, forged: torch.Tensor | None = forged) -> None:
            del tensors[name]
            if forged is not None:
                tensors[name] = forged

        rewritten(run.last, forge)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(TxlError, match=rf"last\.safetensors: .*{word}"):
            trainer(tmp_path, corpus, average="ema", resume=True)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["run.json", "log.jsonl", "last.safetensors", ".lock"])
def test_pipes_in_a_run_are_refused_at_once(finished: Path, corpus: Corpus, name: str) -> None:
    if name == ".lock":
        unlock(finished)
    (finished / name).unlink()
    os.mkfifo(finished / name)
    if name == "run.json":
        with pytest.raises(TxlError, match=r"holds no run .*Not a regular file"):
            read_record(finished)
        return
    with pytest.raises((TxlError, OSError), match=r"Not a regular file: '.*log.jsonl'|no such checkpoint|\.lock"):
        trainer(finished, corpus, resume=True, steps=8, save_every=3, eval_every=6)


@pytest.mark.parametrize("name", ["log.jsonl", "run.json", ".lock"])
def test_links_in_a_run_are_not_followed(tmp_path: Path, corpus: Corpus, name: str) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("kept")
    run.mkdir()
    (run / name).symlink_to(victim)
    if name == ".lock":
        with pytest.raises(OSError, match=rf"Is a symbolic link: '{run}/.lock'"):
            trainer(run, corpus, steps=2)
    else:
        trained = trainer(run, corpus, steps=2)
        (run / "log.jsonl").unlink()
        (run / "log.jsonl").symlink_to(victim)  # while it runs
        with pytest.raises(OSError, match=rf"Is a symbolic link: '{run}/log.jsonl'"):
            trained.run()
    assert victim.read_text() == "kept"


def test_altered_corpus_is_refused(tmp_path: Path, text: Path) -> None:
    own = data.prepare(text, tmp_path / "corpus")
    trainer(tmp_path / "run", own, steps=2).run()
    tokens = bytearray((tmp_path / "corpus" / "train.bin").read_bytes())
    tokens[100] = (tokens[100] + 1) % len(own.vocabulary)
    (tmp_path / "corpus" / "train.bin").write_bytes(tokens)
    altered = data.load(tmp_path / "corpus")
    with pytest.raises(TxlError, match=r"corpus/train.bin is not .*; remove the folder, then run `txl prepare` again$"):
        trainer(tmp_path / "run", altered, resume=True, steps=3)
    with pytest.raises(TxlError, match=r"corpus/train.bin is not what was prepared"):
        trainer(tmp_path / "another", altered, steps=3)
    altered.verify("valid", "test")
    (tmp_path / "corpus" / "train.bin").write_bytes(tokens[:-5])
    with pytest.raises(TxlError, match="the prepared corpus is damaged"):
        data.load(tmp_path / "corpus")


def test_folder_whose_name_is_not_utf8(tmp_path: Path, corpus: Corpus) -> None:
    """An old disk has such names. safetensors and TensorBoard take paths in UTF-8 alone."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    first = trainer(folder / "run", corpus, steps=1)
    first.run()
    unlock(folder / "run")
    trainer(folder / "run", corpus, steps=2, resume=True).run()
    tensors = checkpoints.load(folder / "run").tensors
    save_file(tensors, tmp_path / "plain.safetensors")
    (tmp_path / "plain.safetensors").rename(folder / "weights.safetensors")
    assert pickles.tensors(folder / "weights.safetensors").keys() == tensors.keys()
    pytest.importorskip("tensorboard")
    with pytest.raises(TxlError, match="--tensorboard cannot write to a folder whose name is not UTF-8"):
        Trainer(folder / "other", corpus, first.model.config, first.config, tensorboard=True)
