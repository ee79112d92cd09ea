"""Training: it learns, it resumes bit for bit, it stops when it must."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import IO

import pytest
import torch
from training_helpers import assert_same_run, contents, trainer

import txl
import txl_kernels
from txl.errors import Interrupted, TxlError
from txl.evaluation.evaluate import Reading, evaluate
from txl.text.corpus import Corpus, prepare
from txl.training import checkpoint as checkpoints
from txl.training.run import read_log, read_record, refuse_used_folder
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


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"weight_decay": 0.1}, {"precision": "bf16"}],
    ids=["plain", "accumulate", "AdamW", "bfloat16"],
)
def test_resuming_in_the_middle_is_bit_exact(tmp_path: Path, corpus: Corpus, options: dict[str, object]) -> None:
    trainer(tmp_path / "straight", corpus, **options).run()
    half = trainer(tmp_path / "half", corpus, **options)
    with pytest.raises(Interrupted):
        half.run(lambda entry: half.request_stop() if entry["step"] == 10 and "loss" in entry else None)
    assert half.step == 10
    trainer(tmp_path / "half", corpus, resume=True, **options).run()
    assert_same_run(tmp_path / "straight", tmp_path / "half")


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_resuming_is_bit_exact_wherever_a_tensor_begins_in_the_file(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, padding: int, chunks: int
) -> None:
    """A header has any length, and products of numbers of 64 bits round by their alignment."""
    write = checkpoints.write_tensors

    def padded(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
        write(file, tensors, metadata | {"padding": padding * "x"})

    torch.set_default_dtype(torch.float64)
    try:
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
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_run(tmp_path / "straight", tmp_path / "half")


def command(run: Path, corpus: Corpus, *extra: str) -> list[str]:
    options = (
        "--post-norm --n-layer 2 --d-model 32 --n-head 2 --d-head 16 --d-inner 64 --mem-len 24 --batch 4 "
        "--tgt-len 16 --steps 20 --precision fp32"
    )
    return [sys.executable, "-m", "txl", "train", "--run", str(run), "--data", str(corpus.folder), *options.split(),
            "--save-every", "10", "--eval-every", "20", *extra]  # fmt: skip


def test_a_run_that_ends_after_its_first_validation_goes_on(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while there is a best checkpoint already, and none of its own is due yet."""
    options = {"steps": 8, "eval_every": 2, "save_every": 5}
    whole = trainer(tmp_path / "whole", corpus, **options)
    whole.run()
    killed = trainer(tmp_path / "killed", corpus, **options)
    with monkeypatch.context() as patched:
        patched.setattr(killed, "_update", _until(3, killed._update))
        with pytest.raises(ZeroDivisionError):
            killed.run()
    assert (killed.folder / "best.safetensors").exists()
    trainer(killed.folder, corpus, resume=True, **options).run()
    assert_same_run(whole.folder, killed.folder)


def _until(step: int, update: Callable[[], tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    """Updates up to a step, at which there is an end."""
    left = iter(range(step - 1))

    def one() -> tuple[float, float]:
        if next(left, None) is None:
            raise ZeroDivisionError
        return update()

    return one


def test_ten_steps_kill_9_and_ten_more_equal_twenty(tmp_path: Path, corpus: Corpus) -> None:
    subprocess.run(command(tmp_path / "straight", corpus), check=True, capture_output=True)
    # Killed for good between its checkpoint at step 10 and the one it would write at step 20.
    code = f"""
import os, signal, sys
from txl.commands import cli
from txl.training.trainer import Trainer
update = Trainer._update
def killed(self):
    if self.step == 13: os.kill(os.getpid(), signal.SIGKILL)
    return update(self)
Trainer._update = killed
sys.argv = {command(tmp_path / "killed", corpus)[2:]!r}
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert checkpoints.load(tmp_path / "killed" / "last.safetensors").state["step"] == 10
    subprocess.run(
        [
            sys.executable,
            "-m",
            "txl",
            "train",
            "--run",
            str(tmp_path / "killed"),
            "--data",
            str(corpus.folder),
            "--resume",
        ],
        check=True,
        capture_output=True,
    )
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


def test_an_update_passes_few_files(tmp_path: Path, corpus: Corpus) -> None:
    """From the trainer to the kernel and the optimizer: who follows an update reads these.

    The first call of a shape also passes its checks.
    """
    t = trainer(tmp_path, corpus, model={"attn_dropout": 0.0})
    t.advance(4)  # until memory is full
    passed: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        passed.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(note)
    try:
        t.advance(1)
    finally:
        sys.settrace(before)
    roots = [Path(package.__file__).parent for package in (txl, txl_kernels)]
    ours = [name for name in passed if any(Path(name).is_relative_to(root) for root in roots)]
    assert {"trainer.py", "update.py", "cpu.py"} <= {Path(name).name for name in ours}
    assert len(ours) <= 15, "\n".join(sorted(ours))


def test_nan_stops_and_leaves_the_last_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus)
    t.advance(3)
    t.save()
    with torch.no_grad():
        t.model.softmax.bias[0] = torch.nan
    with pytest.raises(TxlError, match="the loss became nan at step 4; the run's last checkpoint"):
        t.run()
    assert all(x.isfinite().all() for x in contents(tmp_path).values() if x.is_floating_point())


def test_nan_before_any_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus)
    with torch.no_grad():
        t.model.softmax.bias[0] = torch.inf
    with pytest.raises(TxlError, match=r"the loss became (inf|nan) at step 1;"):
        t.run()


def test_resume_refuses_other_options(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus)
    t.save()
    with pytest.raises(TxlError, match=r"cannot resume with other model options: d_inner is 48, was 32"):
        trainer(tmp_path, corpus, resume=True, model={"d_inner": 48})
    with pytest.raises(TxlError, match=r"cannot resume with other training options: lr is 0.1, was 0.003"):
        trainer(tmp_path, corpus, resume=True, lr=0.1)


def test_resume_refuses_another_text(tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path / "run", corpus).save()
    text = tmp_path / "other.txt"
    text.write_bytes(corpus.vocabulary.symbols * 100)
    other = prepare(text, tmp_path / "other")
    assert other.vocabulary == corpus.vocabulary
    with pytest.raises(TxlError, match="cannot resume on another text"):
        trainer(tmp_path / "run", other, resume=True)


def test_a_run_that_ends_between_its_first_best_and_last_checkpoint_goes_on(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoints.save

    def ends(path: Path, *arguments: object) -> None:
        save(path, *arguments)
        if path.name == checkpoints.BEST:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save", ends)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", corpus, steps=4, eval_every=2).run()
    monkeypatch.undo()
    resumed = trainer(tmp_path / "run", corpus, steps=4, eval_every=2, resume=True)
    assert resumed.step == 2
    resumed.run()


def test_a_run_stores_the_precision_that_it_computes_in(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for units, precision in (("avx2", "fp32"), ("amx", "bf16")):
        monkeypatch.setattr("txl.training.config.instruction_set", lambda units=units: units)
        run = tmp_path / units
        assert trainer(run, corpus, precision="auto", steps=1).config.precision == precision
        assert read_record(run).train["precision"] == precision


def test_a_run_is_not_overwritten(tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path, corpus).save()
    with pytest.raises(TxlError, match="already holds a run; continue it with --resume"):
        trainer(tmp_path, corpus)


def test_validation_attends_as_far_as_training(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=1, eval_every=1, model={"mem_len": 0, "dropout": 0.0, "attn_dropout": 0.0})
    t.run()
    entries = read_log(tmp_path / "log.jsonl")
    losses = [
        evaluate(t.model, corpus.valid, corpus.vocabulary.start, Reading(n, method="sliding", segment=8)).nats
        for n in (16, 12)
    ]
    assert losses[0] != losses[1]
    assert entries[-1]["valid_loss"] == losses[0]
    assert checkpoints.load(t.best).attn_len == 16


def test_a_best_checkpoint_cannot_be_resumed(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=1, eval_every=1)
    t.run()
    t.best.replace(t.last)
    with pytest.raises(TxlError, match="holds parameters only"):
        trainer(tmp_path, corpus, resume=True, steps=1, eval_every=1)


def test_a_run_can_be_moved(tmp_path: Path, text: Path) -> None:
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


def test_resuming_nothing(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(TxlError, match="no such checkpoint"):
        trainer(tmp_path, corpus, resume=True)


def test_tensorboard_log(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, steps=2)
    t = Trainer(tmp_path / "b", corpus, t.model.config, t.config, tensorboard=True)
    t.run()
    assert list((tmp_path / "b").glob("events.out.tfevents.*"))
