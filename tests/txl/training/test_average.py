"""Averages of weights: as torch's ASGD, with AWD-LSTM's trigger, resumed bit for bit."""

from pathlib import Path

import pytest
import torch
from model_helpers import small_model
from training_helpers import assert_same_run, trainer

from txl.errors import Interrupted
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.optimizers import WeightAverage, is_due


def random_walk(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))


def test_triggered_average_is_that_of_asgd() -> None:
    """torch.optim.ASGD keeps the mean of its iterates in `ax`; its
    first step counts as none, so it is one behind with t0 = 0."""
    model = small_model()
    average = WeightAverage(model, TrainConfig(average="triggered"))
    random_walk(model)
    average.update()
    assert average.model is model, "nothing is averaged before the trigger"
    average.started = True
    names = [name for name, _ in model.named_parameters()]
    theirs = torch.optim.ASGD(model.parameters(), lr=1e-2, lambd=0.0, alpha=0.0, t0=-1)
    for _ in range(7):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        theirs.step()
        average.update()
    ours = dict(average.model.named_parameters())
    for name, p in zip(names, model.parameters(), strict=True):
        torch.testing.assert_close(ours[name].detach(), theirs.state[p]["ax"], rtol=0, atol=1e-8)


def test_exponential_average_by_hand() -> None:
    model = small_model()
    average = WeightAverage(model, TrainConfig(average="ema", ema_decay=0.9))
    want = None
    for _ in range(5):
        random_walk(model)
        average.update()
        now = model.softmax.bias.detach().clone()
        want = now if want is None else 0.9 * want + 0.1 * now
    torch.testing.assert_close(average.model.softmax.bias.detach(), want, rtol=0, atol=1e-12)
    assert average.model.embedding.tables[0] is average.model.softmax.tables[0], "still tied"


def test_trigger_is_that_of_awd_lstm() -> None:
    """Its main.py: len(best_val_loss) > nonmono and val_loss > min(best_val_loss[:-nonmono])."""
    losses = [5.0, 4.0, 3.0, 3.5, 3.4, 3.3, 3.2, 3.1, 2.9, 3.05]
    fired = [is_due(losses[:n], losses[n], 5) for n in range(len(losses))]
    assert fired == [False] * 9 + [True]
    assert is_due(losses[:7], losses[7], 5) is False  # 3.1 is better than 4.0, the best of all but 5
    assert is_due([1.0], 2.0, 1) is False
    assert is_due([1.0, 3.0], 2.0, 1) is True


PTB = {
    "variational_dropout": True,
    "dropout": 0.25,
    "embedding_dropout": 0.4,
    "output_dropout": 0.4,
    "word_dropout": 0.1,
}


@pytest.mark.parametrize("average", ["triggered", "ema"])
def test_resumed_run_with_an_average_is_bit_exact(
    tmp_path: Path, corpus: Corpus, average: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate makes validation worse; the run stops before and after the trigger."""
    options = {"average": average, "patience": 1, "lr": 0.1, "eval_every": 2, "save_every": 2, "ema_decay": 0.8}
    straight = trainer(tmp_path / "straight", corpus, model=PTB, **options)
    started = []
    straight.run(lambda entry: started.append(straight.updater.average.started) if "valid_loss" in entry else None)
    if average == "triggered":
        assert not started[1], "it must fire in the middle for this test to mean anything"
        assert started[-2]
    for stop in (4, 16):
        half = trainer(tmp_path / "half", corpus, model=PTB, resume=stop > 4, **options)
        with pytest.raises(Interrupted):
            half.run(lambda entry, n=stop, t=half: t.request_stop() if entry["step"] == n and "loss" in entry else None)
    trainer(tmp_path / "half", corpus, model=PTB, resume=True, **options).run()
    assert_same_run(tmp_path / "straight", tmp_path / "half")


def test_average_is_validated_and_saved(tmp_path: Path, corpus: Corpus) -> None:
    t = trainer(tmp_path, corpus, average="ema", ema_decay=0.5, steps=10)
    t.run()
    best, last = checkpoints.load(t.best).part("model"), checkpoints.load(t.last)
    for name, p in last.part("average").items():
        assert torch.equal(best[name], p)
    assert not torch.equal(best["softmax.bias"], last.part("model")["softmax.bias"])
