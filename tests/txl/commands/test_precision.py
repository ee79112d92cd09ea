"""What a run computes in: as asked, or as a trial of a few updates tells."""

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_helpers import SMALL, Run, one_line
from model_helpers import small_config
from training_helpers import trainer

from txl import precision
from txl.distributed import World
from txl.evaluation.evaluate import Reading, evaluation_dtype, sliding_part
from txl.model.transformer import TransformerXL
from txl.precision import ENOUGH_S, FASTER, autocast_dtype, faster, may_help
from txl.text.corpus import Corpus
from txl.training import timing
from txl.training.run import read_record
from txl.training.timing import with_precision
from txl.training.trainer import Trainer
from txl.training.update import NotFinite, Updater

CPU = torch.device("cpu")


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "instruction_set", lambda: "amx")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What an update takes in each precision; real trials advance, their times are these."""
    takes = {"fp32": 1.0, "bf16": 1.0}

    def measured(trial: Trainer, updates: int, world: World) -> float:
        trial.advance(updates)
        return takes[trial.config.precision]

    monkeypatch.setattr(timing, "_seconds", measured)
    return takes


def test_rule() -> None:
    assert autocast_dtype("auto", CPU) is None
    assert autocast_dtype("fp32", CPU) is None
    assert autocast_dtype("bf16", CPU) == torch.bfloat16


@pytest.mark.parametrize(
    ("isa", "helps"),
    [("amx", True), ("avx512_bf16", True), ("neon_bf16", True), ("avx512", False), ("avx2", False), ("neon", False)],
)
def test_where_measuring_is_worth_it(isa: str, helps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "instruction_set", lambda: isa)
    assert may_help(CPU) == helps


def test_without_such_units_nothing_is_tried(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path, corpus)
    monkeypatch.setattr(precision, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(timing, "_trial", None)
    assert with_precision(corpus, t.model.config, t.config, CPU) == (t.config, None)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(
    ("bf16", "chosen"), [(0.5, "bf16"), (0.99 / FASTER, "bf16"), (1.01 / FASTER, "fp32"), (2.0, "fp32")]
)
def test_the_faster_by_a_margin_is_taken(
    bf16: float, chosen: str, tmp_path: Path, corpus: Corpus, seconds: dict[str, float]
) -> None:
    t = trainer(tmp_path, corpus)
    seconds["bf16"] = bf16
    config, said = with_precision(corpus, t.model.config, t.config, CPU)
    assert config.precision == chosen
    assert said is not None
    assert said.startswith(f"precision: {chosen} (an update takes 1 s in fp32, ")


@pytest.mark.parametrize("update", [0.01, 0.3, 100.0])
def test_parts_are_timed_in_turns_until_it_is_enough(update: float) -> None:
    asked: list[str] = []

    def seconds(name: str) -> float:
        asked.append(name)
        slow = 10 if len(asked) == 1 else 1  # once: the median is without it
        return update * slow * (0.5 if name == "bf16" else 1)

    name, said = faster(seconds, "a part")
    assert name == "bf16"
    assert asked == ["fp32", "bf16"] * (len(asked) // 2)
    if update < 0.1:
        assert len(asked) * update * 0.75 == pytest.approx(ENOUGH_S, rel=0.1)
        assert said == "precision: bf16 (a part takes 0.01 s in fp32, 0.005 s in bf16)"
    if update > ENOUGH_S:
        assert len(asked) == 2


@pytest.mark.usefixtures("amx")
def test_a_trial_leaves_the_generator(tmp_path: Path, corpus: Corpus, seconds: dict[str, float]) -> None:
    """And a network that is there, with its gradients and the mask it draws next."""
    t = trainer(tmp_path, corpus)
    t.advance(2)
    kept = [x.clone() for x in (*t.model.parameters(), *t.model.buffers())]
    for p in t.model.parameters():
        p.grad = torch.ones_like(p)
    before = torch.get_rng_state()
    assert with_precision(corpus, t.model.config, t.config, CPU)[1] is not None
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, kept, (*t.model.parameters(), *t.model.buffers())))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in t.model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("amx")
def test_a_trial_changes_nothing_of_the_run(tmp_path: Path, corpus: Corpus, seconds: dict[str, float]) -> None:
    plain = trainer(tmp_path / "plain", corpus, steps=6)
    plain.advance(6)
    config, _ = with_precision(corpus, plain.model.config, plain.config, CPU)
    tried = Trainer(tmp_path / "tried", corpus, plain.model.config, config)
    tried.advance(6)
    assert config.precision == "fp32"
    for a, b in zip(plain.model.parameters(), tried.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_what_is_asked_for_is_not_measured(
    asked: str, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path, corpus, precision=asked)
    monkeypatch.setattr(timing, "_trial", None)
    assert with_precision(corpus, t.model.config, t.config, CPU) == (t.config, None)


@pytest.mark.usefixtures("amx")
def test_a_run_that_goes_on_keeps_what_was_measured(
    txl: Run, tmp_path: Path, corpus: Corpus, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds["bf16"] = 0.5
    auto = [x for x in SMALL if x not in ("--precision", "fp32")]
    begun = txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *auto)
    assert "precision: bf16 (an update takes 1 s in fp32, 0.5 s in bf16)" in begun.stdout
    assert read_record(tmp_path / "r").train["precision"] == "bf16"
    monkeypatch.setattr(timing, "_trial", None)
    for more in ([], ["--precision", "auto"]):
        done = txl("train", "--run", tmp_path / "r", "--resume", "--steps", 4 + len(more), *more)
        assert done.returncode == 0
        assert ("precision: bf16, as when the run began" in done.stdout) == bool(more)
    assert read_record(tmp_path / "r").train["precision"] == "bf16"


@pytest.mark.usefixtures("amx")
def test_a_trial_is_no_longer_than_the_run(
    tmp_path: Path, corpus: Corpus, seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    advance = Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda t, n: (advance(t, n), done.append(t.step)))
    t = trainer(tmp_path, corpus, steps=5)
    seconds |= {"fp32": 1e-3, "bf16": 1e-4}
    assert with_precision(corpus, t.model.config, t.config, CPU)[0].precision == "bf16"
    assert max(done) == 5
    config, said = with_precision(corpus, t.model.config, dataclasses.replace(t.config, steps=2), CPU)
    assert (config.precision, said) == ("fp32", "precision: fp32 (a run of 2 updates is too short to measure bf16)")


@pytest.mark.usefixtures("amx", "seconds")
def test_a_trial_that_fails_ends_in_fp32(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path, corpus)
    update = Updater.update

    def fails_in_bf16(updater: Updater, step: int, *rest: Any) -> Any:
        if updater.dtype is not None and step == 2:
            raise NotFinite("the loss became nan")
        return update(updater, step, *rest)

    monkeypatch.setattr(Updater, "update", fails_in_bf16)
    config, said = with_precision(corpus, t.model.config, t.config, CPU)
    assert (config.precision, said) == ("fp32", "precision: fp32 (in a trial of both the loss became nan)")

    def fails(*_: Any) -> Any:
        raise OSError("the disk is full")

    monkeypatch.setattr(Updater, "update", fails)
    with pytest.raises(OSError, match="the disk is full"):
        with_precision(corpus, t.model.config, t.config, CPU)


@pytest.mark.usefixtures("amx", "seconds")
def test_models_of_a_trial_go_with_it(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Trainer]] = []
    begin = Trainer.__init__

    def remembered(self: Trainer, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **options)

    t = trainer(tmp_path, corpus)
    monkeypatch.setattr(Trainer, "__init__", remembered)
    gc.disable()
    try:
        with_precision(corpus, t.model.config, t.config, CPU)
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()


def test_bf16_follows_fp32(tmp_path: Path, corpus: Corpus) -> None:
    """Losses of the first updates differ by what rounding to eight bits does."""
    losses = {}
    for name in ("fp32", "bf16"):
        found: list[float] = []
        t = trainer(tmp_path / name, corpus, steps=30, precision=name, log_every=1)
        t.run(lambda entry, found=found: found.append(entry["loss"]) if "loss" in entry else None)  # type: ignore[misc]
        losses[name] = found
        assert all(p.dtype == torch.float32 for p in t.model.parameters())
    assert len(losses["fp32"]) == len(losses["bf16"]) > 10
    assert losses["fp32"] != losses["bf16"]
    for a, b in zip(losses["fp32"], losses["bf16"], strict=True):
        assert abs(a - b) < 0.02


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize(("half", "chosen"), [(0.5, torch.bfloat16), (2.0, None)])
def test_evaluation_is_measured_too(half: float, chosen: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def part() -> None:
        now[0] += half if torch.is_autocast_enabled("cpu") else 1.0

    monkeypatch.setattr("txl.evaluation.evaluate.time.perf_counter", lambda: now[0])
    dtype, said = evaluation_dtype("auto", CPU, part)
    assert dtype == chosen
    assert said == f"precision: {'fp32' if chosen is None else 'bf16'} (a part takes 1 s in fp32, {half:.3g} s in bf16)"


def test_evaluation_takes_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> None:
        raise AssertionError("nothing is to be measured")

    assert evaluation_dtype("fp32", CPU, part) == (None, None)
    assert evaluation_dtype("bf16", CPU, part) == (torch.bfloat16, None)
    monkeypatch.setattr(precision, "instruction_set", lambda: "avx2")
    assert evaluation_dtype("auto", CPU, part) == (None, None)


@pytest.mark.parametrize(("count", "windows"), [(100, 4), (14, 2), (9, 1), (3, 1)])
def test_a_part_of_sliding_is_one_block_of_whole_windows(
    count: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TransformerXL(small_config(vocab_size=11))
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(
        model,
        "read",
        lambda block, **rest: (read.append(tuple(block.shape)), TransformerXL.read(model, block, **rest))[1],
    )
    sliding_part(model, np.arange(count) % 11, 0, Reading(8, segment=3), batch=4)()
    if count >= 11:
        assert read[0] == (min(windows, 4), 8)
    assert sum(rows for rows, _ in read) == windows


def test_eval_in_bf16(txl: Run, tmp_path: Path, corpus: Corpus) -> None:
    txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL)
    found: dict[str, float] = {}
    for name in ("fp32", "bf16"):
        done = txl("eval", tmp_path / "r", "--limit", 2000, "--precision", name)
        assert ("in bfloat16" in done.stdout) == (name == "bf16")
        found[name] = float(done.stdout.split("│")[3])
    assert found["fp32"] == pytest.approx(found["bf16"], abs=0.01)
    one_line(txl("eval", tmp_path / "r", "--precision", "fp8"), "--precision must be auto, fp32, bf16, got 'fp8'")


def test_eval_of_an_lstm_in_bf16(txl: Run, tmp_path: Path, corpus: Corpus) -> None:
    trainer(tmp_path / "r", corpus, steps=2, eval_every=2, model={"network": "lstm"}).run()
    said = txl("eval", tmp_path / "r", "--limit", 500, "--precision", "bf16").stdout
    assert "segments in bfloat16" in said
    assert "all before" in said
