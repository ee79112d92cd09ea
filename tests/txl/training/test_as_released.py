"""Training as the released code: losses, learning rates and parameters over epochs."""

import copy

import numpy as np
import pytest
import torch
from model_helpers import small_config
from released import training as released
from training_helpers import trainer

from txl import TransformerXL, recipes
from txl.distributed import World
from txl.errors import TxlError
from txl.text.corpus import Corpus
from txl.text.streams import Streams
from txl.training.config import TrainConfig, learning_rate
from txl.training.segments import Batches
from txl.training.update import Updater

CPU = torch.device("cpu")
UPDATES = 20


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (4 * 49, {"warmup": 0}),  # streams of 48 targets, whole segments
        (4 * 53, {"warmup": 2, "batch_chunk": 2}),
        (4 * 53 + 1, {"warmup": 12, "min_lr_ratio": 0.1}),
        (4 * 53 + 3, {"warmup": 50}),
    ],
)
def test_updates_of_the_released_loop(count: int, options: dict[str, object]) -> None:
    tokens = np.random.default_rng(0).integers(0, 31, count).astype(np.uint8)
    torch.manual_seed(0)
    ours = TransformerXL(small_config(mem_len=20)).double()
    theirs = copy.deepcopy(ours)
    config = TrainConfig(
        steps=UPDATES,
        batch=4,
        tgt_len=16,
        lr=3e-3,
        schedule="cosine-released",
        streams="released",
        precision="fp32",
        **options,
    )
    streams = Streams(tokens, config.batch, config.scored, config.context, config.streams)
    batches = Batches(streams, config, ours.config, World(), CPU)
    updater = Updater(ours, config, World(), CPU)
    got = [updater.update(n, batches).loss for n in range(UPDATES)]
    want, rates = released.train(
        theirs, torch.from_numpy(tokens).long(), max_step=UPDATES, batch=4, length=16, lr=config.lr, clip=config.clip,
        warmup_step=config.warmup, eta_min=config.lr * config.min_lr_ratio, batch_chunk=config.batch_chunk,
    )  # fmt: skip
    assert [learning_rate(n, config) for n in range(UPDATES)] == pytest.approx(rates, rel=1e-12, abs=1e-18)
    assert got == pytest.approx(want, rel=2e-7)  # a loss is reported in float32
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-11)


def test_recipes_of_the_pytorch_scripts() -> None:
    found = [recipe for recipe in map(recipes.load, recipes.names()) if "released PyTorch code" in recipe.source]
    assert len(found) == 8
    for recipe in found:
        train = recipe.train_config()
        assert train.schedule == "cosine-released"
        assert train.streams == ("all" if recipe.data["rule"] == "one-billion-word" else "released")


def test_streams_of_a_trainer(tmp_path, corpus: Corpus) -> None:
    count = len(corpus.train)
    every = trainer(tmp_path / "a", corpus).batches.streams
    fewer = trainer(tmp_path / "b", corpus, streams="released").batches.streams
    assert (every.stream_len, fewer.stream_len) == ((count - 1) // 4, count // 4 - 1)
    with pytest.raises(TxlError, match="streams must be one of all, released, got 'some'"):
        TrainConfig(streams="some")  # type: ignore[arg-type]
