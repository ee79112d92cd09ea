"""The loss of an update: chunks, overlapping segments, half loss, auxiliary losses."""

import math
from pathlib import Path

import pytest
import torch
from model_helpers import small_model
from training_helpers import assert_same_run, trainer

from txl.errors import Interrupted, TxlError
from txl.evaluation.evaluate import Reading, evaluate
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.run import read_log
from txl.training.segments import SegmentTraining, layers_that_predict
from txl.training.trainer import Trainer

SYSTEMS: dict[str, dict[str, object]] = {
    "recurrence, ours, half": {},
    "recurrence, Shaw, full": {"encoding": "shaw", "table_len": 40},
    "recurrence, Shaw as released": {"encoding": "shaw-released", "table_len": 40},
    "recurrence, sinusoids": {"encoding": "sinusoid"},
    "no recurrence, ours": {"mem_len": 0},
    "no recurrence, Vaswani": {"encoding": "sinusoid", "mem_len": 0},
    "no recurrence, Al-Rfou": {"encoding": "learned", "table_len": 16, "mem_len": 0, "second_target": True},
    "bins": {"cutoffs": (3, 7), "div_val": 2},
    "LSTM": {"network": "lstm"},
    "QRNN": {"network": "qrnn"},
}
TRAINING: dict[str, dict[str, object]] = {
    "recurrence, ours, half": {"loss": "half"},
    "no recurrence, Al-Rfou": {"intermediate_losses": True},
    "LSTM": {"lr": 5e-2},
    "QRNN": {"lr": 5e-2},
    "accumulated": {"accumulate": 2},
    "weight decay": {"weight_decay": 0.1},
    "bfloat16": {"precision": "bf16"},
    "recomputed": {"recompute": True},
    "chunks": {"batch_chunk": 2, "accumulate": 2},
}


def gradients(t: Trainer) -> list[torch.Tensor]:
    """Return the gradients of the first update, not clipped."""
    kept: list[torch.Tensor] = []
    for optimizer in t.updater.optimizers:
        optimizer.step = lambda: kept.extend(p.grad.clone() for p in t.model.parameters())  # type: ignore[method-assign]
    t.advance(1)
    return kept


PLAIN = {"model": {"dropout": 0.0, "attn_dropout": 0.0}, "clip": 1e9}


@pytest.mark.parametrize("mem_len", [0, 5])
def test_memory_ends_where_the_next_segment_begins(mem_len: int) -> None:
    """With ext_len the memory leaves out the tokens that are read again."""
    model = small_model(mem_len=mem_len)
    tokens = torch.randint(31, (2, 30))
    first = model.read(tokens[:, :10], ext_len=4)
    again = model.read(tokens[:, 6:16], first.memory, ext_len=4)
    plain = model.read(tokens[:, :6])  # positions 0 .. 5 are what memory holds
    want = model.read(tokens[:, 6:16], plain.memory, ext_len=4)
    torch.testing.assert_close(again.hidden, want.hidden)
    if mem_len:
        assert first.memory[0].size(1) == 5


def test_half_loss_gradient_by_hand(tmp_path: Path, corpus: Corpus) -> None:
    """The second update: the later 8 of 16 tokens are scored."""
    model = small_model(mem_len=0)
    tokens, targets = torch.randint(31, (2, 16)), torch.randint(31, (2, 8))
    loss = SegmentTraining(model)(tokens, targets, None, ext_len=8)
    want = torch.nn.functional.cross_entropy(model(tokens)[0][:, 8:].flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss.total, want)
    assert loss.memory is None


def test_layers_that_predict() -> None:
    """Al-Rfou et al.: of n layers the l-th stops after l / 2n of training; the last goes on."""
    n = 6
    for step in range(24):
        done = step / 24
        assert list(layers_that_predict(n, done)) == [i for i in range(n - 1) if done < (i + 1) / (2 * n)]


def test_auxiliary_losses_by_hand() -> None:
    model = small_model(mem_len=0, second_target=True)
    tokens = torch.randint(31, (2, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    layers = model.read(inputs).layers

    def at(hidden: torch.Tensor) -> torch.Tensor:
        following = model.softmax.log_probs(hidden).gather(2, targets[..., None]).mean()
        after = model.second_softmax.log_probs(hidden[:, :-1]).gather(2, targets[:, 1:, None]).mean()
        return -following - 0.5 * after

    loss = SegmentTraining(model)(inputs, targets, None, intermediate=range(1))
    torch.testing.assert_close(loss.total, at(layers[0]) + at(layers[1]))
    torch.testing.assert_close(loss.nll, -model.softmax.log_probs(layers[1]).gather(2, targets[..., None]).mean())


@pytest.mark.parametrize("name", SYSTEMS | TRAINING)
def test_training_learns_and_resumes_bit_for_bit(tmp_path: Path, corpus: Corpus, name: str) -> None:
    options: dict[str, object] = {"steps": 12, "save_every": 6, "eval_every": 6, "lr": 1e-2, "seed": 1}
    options["eval_tokens"] = 128
    options |= TRAINING.get(name, {})
    model = SYSTEMS.get(name, {})
    straight = trainer(tmp_path / "straight", corpus, model=model, **options)
    first: list[float] = []
    straight.run(lambda entry: first.append(entry["loss"]) if "loss" in entry else None)
    assert first[-1] < first[0] - 0.2
    assert math.isfinite(straight.best_loss)
    half = trainer(tmp_path / "half", corpus, model=model, **options)
    with pytest.raises(Interrupted):
        half.run(lambda entry: half.request_stop() if entry["step"] == 5 and "loss" in entry else None)
    trainer(tmp_path / "half", corpus, model=model, resume=True, **options).run()
    assert_same_run(tmp_path / "straight", tmp_path / "half")


def test_recomputed_activations_change_nothing(tmp_path: Path, corpus: Corpus) -> None:
    """Dropout draws the same random numbers again."""
    a = gradients(trainer(tmp_path / "a", corpus, clip=1e9))
    b = gradients(trainer(tmp_path / "b", corpus, clip=1e9, recompute=True))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 6, "batch_chunk": 4}, "batch must be a multiple of batch_chunk, got 6 and 4"),
        ({"loss": "third"}, "loss must be one of full, half, got 'third'"),
        ({"loss": "half", "ext_len": 3}, "loss 'half' needs tgt_len >= 2 and no ext_len of its own, got 128 and 3"),
        ({"optimizer": "sgd"}, "optimizer must be one of adam, muon, got 'sgd'"),
        ({"schedule": "linear"}, "schedule must be one of cosine, cosine-released, constant, got 'linear'"),
        ({"precision": "fp8"}, "precision must be one of auto, fp32, bf16, got 'fp8'"),
    ],
)
def test_bad_training_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(TxlError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "readings"),
    [
        (
            {"encoding": "sinusoid", "mem_len": 16, "window": 16},
            [Reading(n, method="segments", segment=16) for n in (32, 24)],
        ),
        ({"mem_len": 0}, [Reading(n, method="sliding", segment=8) for n in (16, 12)]),
    ],
    ids=["memory and window", "no memory"],
)
def test_validation_attends_as_far_as_training(
    tmp_path: Path, corpus: Corpus, options: dict[str, object], readings: list[Reading]
) -> None:
    options = options | {"dropout": 0.0, "attn_dropout": 0.0}
    t = trainer(tmp_path, corpus, model=options, steps=1, eval_every=1)
    t.run()
    entries = read_log(tmp_path / "log.jsonl")
    losses = [evaluate(t.model, corpus.valid, corpus.vocabulary.start, reading).nats for reading in readings]
    assert losses[0] != losses[1]
    assert entries[-1]["valid_loss"] == losses[0]
    saved = checkpoints.load(t.best)
    assert (saved.attn_len, saved.segment) == (16, 16)
