"""`txl train`: recipes, minutes, resumed and initialized runs, errors."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_helpers import SMALL, Run, one_line, succeeded

from txl import ModelConfig, recipes
from txl.errors import Interrupted, TxlError
from txl.model.config import config_from_json
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.run import read_log, read_record
from txl.training.trainer import Trainer


def test_default_recipe(txl: Run, corpus: Corpus, tmp_path: Path) -> None:
    done = txl("train", "--run", tmp_path / "r", "--data", corpus.folder, "--steps", "1", "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    record, recipe = read_record(tmp_path / "r"), recipes.load(recipes.DEFAULT)
    assert {k: record.model[k] for k in recipe.model} == recipe.model
    assert {k: record.train[k] for k in recipe.train} == recipe.train | {"steps": 1}
    assert done.stdout.startswith("Transformer-XL, 4 layers x 128, 0.86M parameters; ")


def test_minutes_set_the_number_of_updates(txl: Run, corpus: Corpus, tmp_path: Path) -> None:
    options = [x for x in SMALL if x not in ("--steps", "3")]
    succeeded(txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *options, "--minutes", "0.02"))
    train = read_record(tmp_path / "r").train
    assert train["steps"] > 5
    assert train["warmup"] is None
    assert 1 < train["eval_every"] < train["steps"]
    assert checkpoints.load(tmp_path / "r" / "last.safetensors").state["step"] == train["steps"]
    one_line(txl("train", "--run", tmp_path / "s", "--minutes", "-1"), "--minutes must be > 0")
    one_line(txl("train", "--run", tmp_path / "s", "--minutes", "1", "--steps", "3"), "goes neither with --steps")


def test_minutes_keep_given_options(txl: Run, corpus: Corpus, tmp_path: Path) -> None:
    options = [x for x in SMALL if x not in ("--steps", "3")]
    begin = ["train", "--data", corpus.folder, *options, "--minutes", "0.02"]
    succeeded(txl(*begin, "--run", tmp_path / "all", "--eval-every", "7", "--save-every", "3", "--warmup", "11"))
    train = read_record(tmp_path / "all").train
    assert [train[name] for name in ("eval_every", "save_every", "warmup")] == [7, 3, 11]
    steps = [entry["step"] for entry in read_log(tmp_path / "all" / "log.jsonl") if "valid_loss" in entry]
    assert steps == sorted({*range(7, train["steps"], 7), train["steps"]})
    done = txl(*begin, "--run", tmp_path / "one", "--save-every", "2")  # a checkpoint before the clock is followed
    assert done.returncode == 0, done.stderr
    train = read_record(tmp_path / "one").train
    assert (train["save_every"], train["warmup"]) == (2, None)
    assert 2 < train["eval_every"] < train["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(0.002, 0.02), (0.02, 0.002)])
def test_minutes_follow_a_changing_speed(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: float, then: float
) -> None:
    """Updates become ten times slower or faster; the run takes the time given, and validates."""
    update = Trainer._update

    def slow(self: Trainer) -> Any:
        time.sleep(first if self.step < 20 else then)
        return update(self)

    monkeypatch.setattr(Trainer, "_update", slow)
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16, "mem_len": 8}
    model = ModelConfig(vocab_size=len(corpus.vocabulary), **sizes)
    config = TrainConfig(batch=2, tgt_len=8, eval_tokens=200, log_every=1000)
    entries: list[dict[str, Any]] = []
    trainer = Trainer(tmp_path / "r", corpus, model, config)
    began = time.perf_counter()
    trainer.run(entries.append, seconds=3.0)
    assert 2.5 < time.perf_counter() - began < 9.0  # on a busy machine, too
    assert sum("valid_loss" in entry for entry in entries) >= 2
    assert read_record(tmp_path / "r").train["steps"] == trainer.step == trainer.config.steps


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--recipe wt103-base", "cutoffs must increase, above 0 and below the 25 of vocab_size"),
        ("--cutoffs 4,x", "--cutoffs takes whole numbers separated by commas, or none, got '4,x'"),
        ("--encoding learned --table-len 8 --tie-r", "segments of 16 tokens are beyond the 8 learned positions"),
        ("--ema-decay 0.9", "--ema-decay is for --average ema, not none; leave it out"),
        ("--min-lr-ratio 0.1 --schedule constant", "--min-lr-ratio is for a schedule that falls, not --schedule const"),
    ],
)
def test_errors_are_one_line(txl: Run, corpus: Corpus, tmp_path: Path, options: str, words: str) -> None:
    one_line(txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL, *options.split()), words)
    assert not (tmp_path / "r" / "last.safetensors").exists()


def test_option_of_another_network(txl: Run, corpus: Corpus, tmp_path: Path) -> None:
    begin = ["train", "--run", tmp_path / "r", "--data", corpus.folder]
    one_line(txl(*begin, "--recipe", "laptop-lstm", "--mem-len", 8), "error: an LSTM or QRNN has no mem_len\n")
    with pytest.raises(TxlError, match="a Transformer needs vocab_size"):
        config_from_json({"d_model": 8})


def test_help_shows_the_default_recipes_values_and_whole_paragraphs(txl: Run) -> None:
    shown = " ".join(txl("train", "-h").stdout.replace("│", " ").split())
    recipe = recipes.load(recipes.DEFAULT)
    for name, value in {**recipe.model, **recipe.train, "cutoffs": "none", "ext_len": 0}.items():
        if value is not None and not isinstance(value, bool):
            assert f"[default: (laptop: {value})]" in shown, name
    lines = [line.strip() for line in txl("prepare", "-h").stdout.splitlines()]
    after = lines[lines.index(next(x for x in lines if x.startswith("The bar of the first"))) + 1]
    assert len(after.split()) > 3  # no line of one word in the middle of a paragraph


def test_diverged_run_says_so(txl: Run, corpus: Corpus, tmp_path: Path) -> None:
    begin = ["train", "--data", corpus.folder, *SMALL, "--warmup", 0]
    assert "has diverged" not in succeeded(txl(*begin, "--run", tmp_path / "a")).stdout
    shown = succeeded(txl(*begin, "--run", tmp_path / "b", "--lr", 1000, "--clip", "1e9")).stdout
    assert "the run has diverged: its validation loss, " in shown
    assert f", is over twice that of guessing, {math.log(len(corpus.vocabulary)):.2f}; " in shown


def test_finished_run_that_is_resumed_says_so(txl: Run, run: Path, tmp_path: Path) -> None:
    done = shutil.copytree(run, tmp_path / "r")
    assert "all 3 updates are done already; more take" in succeeded(txl("train", "-r", done, "--resume")).stdout
    assert "done already" not in succeeded(txl("train", "-r", done, "--resume", "--steps", 4)).stdout


@pytest.mark.parametrize("seconds", [1e-9, 60.0])
def test_minutes_interrupted_before_the_clock_is_followed(corpus: Corpus, tmp_path: Path, seconds: float) -> None:
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 1, "d_head": 16, "d_inner": 16, "mem_len": 8}
    model = ModelConfig(vocab_size=len(corpus.vocabulary), **sizes)
    trainer = Trainer(tmp_path / "r", corpus, model, TrainConfig(steps=10**6, batch=2, tgt_len=8, log_every=1))
    with pytest.raises(Interrupted):
        trainer.run(lambda entry: trainer.request_stop(), seconds=seconds)
    assert (trainer.step, trainer.saved_step) == (1, 1)
    assert 2 <= read_record(tmp_path / "r").train["steps"] < 10**6


def test_default_text_is_named(txl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a slip: --data forgotten beside the name of a new corpus."""

    def refused(*arguments: object, **options: object) -> None:
        raise TxlError("stopped")

    monkeypatch.setattr("txl.text.corpus.prepare", refused)
    for command in (["prepare", tmp_path / "c"], ["train", "--run", tmp_path / "r"]):
        assert txl(*command).stdout == "--data is not given: the text is Python's standard library\n"


def test_fields_of_the_log(run: Path) -> None:
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert {"step", "loss", "bpc", "ppl", "grad_norm", "lr", "tokens_per_s"} == set(entries[0])
    assert {"step", "valid_loss", "valid_bpc", "valid_ppl"} == set(entries[-1])


def test_recipe_prepares_raw_text(txl: Run, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text("The cat sat on the Mat\n" * 60)
    options = "--n-layer 1 --d-model 16 --n-head 2 --d-head 8 --d-inner 16 --batch 2 --tgt-len 8 --steps 2".split()
    succeeded(txl("train", "--run", tmp_path / "r", "--recipe", "ptb", "--data", tmp_path, *options))
    corpus = data.load(tmp_path / "r" / "corpus")
    assert (corpus.rule, corpus.vocabulary.unit) == ("penn-treebank", "words")


def test_init(txl: Run, run: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Parameters, sizes and vocabulary are those of the other run; the text may be raw."""
    source = checkpoints.load(run)
    options = "--steps 1 --lr 1e-9 --warmup 0 --batch 2 --tgt-len 16 --mem-len 8 --dropout 0.3".split()
    succeeded(txl("train", "--run", tmp_path / "r", "--init", run, "--data", corpus.folder, *options))
    begun = checkpoints.load(tmp_path / "r" / "last.safetensors")
    assert (begun.config.mem_len, begun.config.dropout, begun.config.d_model) == (8, 0.3, source.config.d_model)
    for name, x in source.part("model").items():
        torch.testing.assert_close(begun.part("model")[name], x, rtol=0, atol=1e-6)
    text = tmp_path / "text"
    text.write_bytes(source.vocabulary.decode(list(range(5)) * 400))
    succeeded(txl("train", "--run", tmp_path / "s", "--init", run, "--data", text, *options))
    assert checkpoints.load(tmp_path / "s").vocabulary == source.vocabulary
    text.write_bytes(bytes(range(65, 65 + len(source.vocabulary))) * 300)  # as many symbols, but others
    txl("prepare", tmp_path / "other", "--data", text)
    done = txl("train", "--run", tmp_path / "t", "--init", run, "--data", tmp_path / "other", *options)
    one_line(done, "its vocabulary is not that of the corpus")
    text.write_bytes(b"\x01\x02" * 1000)
    one_line(
        txl("train", "--run", tmp_path / "t", "--init", run, "--data", text, *options), "the training data never did"
    )
    one_line(
        txl("train", "--run", tmp_path / "t", "--init", run, "--data", corpus.folder, "--d-model", "32"),
        "the configuration needs",
    )
    one_line(txl("train", "--run", tmp_path / "r", "--resume", "--init", run), "leave --init out")
    one_line(
        txl("train", "--run", tmp_path / "t", "--init", tmp_path / "no", "--data", corpus.folder), "no such checkpoint"
    )


KILLED = """
import os, pathlib, signal, sys
from txl.commands.cli import app
from txl.text import corpus
from txl.training import trainer
def kill(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(*{"preparing": (corpus, "write_corpus"), "prepared": (trainer, "make_network"),
          "replacing": (pathlib.Path, "rename")}[sys.argv.pop(1)], kill)
app()
"""


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_starts_again(txl: Run, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    command = ["train", "--run", run, "--data", text, *SMALL, "--device", "cpu"]
    for when in ("preparing", "prepared"):
        assert subprocess.run([sys.executable, "-c", KILLED, when, *command], check=False).returncode == -signal.SIGKILL
        assert (run / "corpus").exists() == (when == "prepared")
    succeeded(txl(*command))
    assert not [*run.glob(".*.tmp")]
    data.load(run / "corpus").verify()


@pytest.fixture(scope="module")
def killed_while_replacing(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a checkpoint, with a corpus and a new one."""
    run = tmp_path_factory.mktemp("killed") / "r"
    for when in ("prepared", "replacing"):
        command = ["train", "--run", run, *SMALL, "--device", "cpu", "--data", text]
        killed = subprocess.run([sys.executable, "-c", KILLED, when, *command], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert (run / "corpus.new").exists()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("source", ["text", "prepared", "what was left"])
def test_run_killed_while_replacing_its_corpus(
    txl: Run, corpus: Corpus, text: Path, killed_while_replacing: Path, tmp_path: Path, source: str
) -> None:
    run = shutil.copytree(killed_while_replacing, tmp_path / "r")
    given = {"text": text, "prepared": corpus.folder, "what was left": run / "corpus.new"}[source]
    succeeded(txl("train", "--run", run, *SMALL, "--device", "cpu", "--data", given))
    assert (run / "corpus.new").exists() == (source == "what was left")
    assert (run / "corpus").exists() == (source == "text")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_run_must_be_a_folder(txl: Run, corpus: Corpus, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    done = txl("train", "-r", tmp_path / name, "--data", corpus.folder, *SMALL)
    one_line(done, f"--run must name a folder that can be written, got {tmp_path / name}: Not a directory")
    assert (tmp_path / "file").read_text() == "kept"
