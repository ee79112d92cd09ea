"""`txl recl`, `txl attention`: results, pictures, errors."""

import json
import shutil
from pathlib import Path

import pytest
from command_helpers import SMALL, Run, one_line, succeeded

from txl.model.config import config_from_json
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

RECL = "--samples 30 --step 8 --contexts 4 --split train".split()
ATTENTION = "--window 16 --limit 200".split()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> dict[str, Path]:
    """Small runs of several kinds of network."""
    folder, size = tmp_path_factory.mktemp("runs"), len(corpus.vocabulary)
    alone = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "mem_len": 0}
    kinds = {
        "lstm": {"network": "lstm", "n_layer": 1, "d_model": 16, "d_inner": 16},
        "learned": alone | {"encoding": "learned", "table_len": 20},
        "sinusoid": alone | {"encoding": "sinusoid"},
    }
    for name, sizes in kinds.items():
        config = config_from_json({"vocab_size": size} | sizes)
        Trainer(folder / name, corpus, config, TrainConfig(steps=3, batch=2, tgt_len=16)).run()
    return {name: folder / name for name in kinds}


def test_recl_of_a_group(txl: Run, run: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    done = succeeded(txl("recl", run, runs["lstm"], runs["learned"], *RECL, "--out", tmp_path))
    result = json.loads((tmp_path / "recl.json").read_text())
    assert result["contexts"] == [8, 16, 24, 32]
    assert result["limits"] == {run.name: None, "lstm": None, "learned": 16}
    assert "its contexts end at 16 tokens, as its absolute positions reach 16" in done.stdout
    for group in result["effective"].values():
        short = [found["short"] for found in group.values()]
        assert short[0] == short[1] == short[2]
        assert group["learned"]["length"] <= 16
    assert result["perplexity"]["learned"][1] == result["perplexity"]["learned"][3]  # l(c > K) = l(K)
    for name in ("figure-3.png", "figure-4.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    succeeded(txl("recl", run, runs["lstm"], runs["learned"], *RECL, "--out", tmp_path))
    second = json.loads((tmp_path / "recl.json").read_text())
    assert {**second, "seconds": 0} == {**result, "seconds": 0}


def test_names_with_markup_and_mathematics(txl: Run, run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "_[b] $a$b$\\frac$ {x} %s"
    shutil.copytree(run, odd)
    done = succeeded(txl("recl", odd, *RECL))
    assert "[b] $a$b$" in done.stdout
    assert (odd / "recl" / "figure-3.png").stat().st_size > 1000
    assert txl("eval", odd).returncode == 0


def test_attention(txl: Run, run: Path, corpus: Corpus, tmp_path: Path) -> None:
    done = succeeded(txl("attention", run, *ATTENTION, "--heads", "2,1", "--out", tmp_path))
    assert f"{min(200, len(corpus.valid)) - 15:,} tokens with windows of 16; heads 2, 1 in figure 6" in done.stdout
    for name in ("figure-5.png", "figure-6.png", "figure-7.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_eval_of_an_lstm(txl: Run, runs: dict[str, Path]) -> None:
    done = succeeded(txl("eval", runs["lstm"], "--split", "valid"))
    assert "all before" in done.stdout
    one_line(txl("eval", runs["lstm"], "--attn-len", "8"), "attn_len is for Transformers")
    one_line(txl("eval", runs["lstm"], "--zeros"), "zeros is for Transformers")
    succeeded(txl("eval", runs["lstm"], "--attn-len", "8", "--method", "sliding", "--limit", "50"))


BAD = {
    "recl {run} {other}": "its vocabulary is not that of",
    "recl {run} {run}": "a model is given twice",
    "recl {run} --step 200 --split test": "fewer than two contexts of 2,000",
    "recl {learned} --step 24 --contexts 3 --split train": "contexts begin at 24 tokens, beyond the 16",
    "recl {sinusoid} --step 24 --contexts 3 --split train": "contexts begin at 24 tokens, beyond the 16",
    "recl {run} --ratio 0.1,2": "--ratio takes numbers in (0, 1] separated by commas, got '0.1,2'",
    "recl {run} --ratio few": "--ratio takes numbers in (0, 1] separated by commas, got 'few'",
    "recl {run} {run}/best.safetensors": "a model is given twice",
    "recl {run} --step 4 --out {text}": "--out must name a folder that can be written",
    "attention {run} --window 16 --out {text}": "--out must name a folder that can be written",
    "train --run new --init {run} --recipe laptop-lstm --data {text}": "is of another kind of network than",
    "recl {begun}": "no such checkpoint",
    "attention {run} --window 1": "--window must be >= 2, got 1",
    "attention {run} --window 100000": "the text has",
    "attention {run} --limit 0": "--limit must be >= 1, got 0",
    "attention {run} --heads 3": "--heads must be from 1 to 2, got 3",
    "attention {run} --heads x": "--heads takes whole numbers separated by commas, got 'x'",
    "attention {lstm}": "a picture of attention is for Transformers, not for a network of kind 'lstm'",
    "attention {sinusoid}": "encoding 'sinusoid' has no positions in its scores",
}


@pytest.mark.parametrize("arguments", BAD)
def test_errors_are_one_line(
    txl: Run, arguments: str, run: Path, runs: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_text((run / "run.json").read_text())
    other = tmp_path / "other"
    if "{other}" in arguments:
        (tmp_path / "other.txt").write_text("of other letters\n" * 300)
        assert txl("train", "--run", other, "--data", "other.txt", *SMALL).returncode == 0
    done = txl(*arguments.format(run=run, other=other, begun=begun, text=text, **runs).split())
    one_line(done, BAD[arguments])
