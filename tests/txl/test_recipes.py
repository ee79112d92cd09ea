"""Recipes: published parameter counts, sources, and options that can be trained and evaluated."""

import math
from typing import get_args

import pytest
import torch

from txl import recipes
from txl.errors import TxlError
from txl.evaluation.evaluate import Method
from txl.model import make_network
from txl.model.config import RecurrentConfig
from txl.model.transformer import count_parameters
from txl.text.datasets import RULES
from txl.training.config import learning_rate

# Counted from the released code (or, of models that were not released, of their named sizes).
MILLIONS = {
    "enwik8-base": 41.055, "enwik8-18l": 87.228, "enwik8-large": 277.232, "wt103-base": 151.108, "wt103-large": 285.171,
    "wt103-large-tf": 285.205, "wt103-128m": 127.554, "lm1b-base": 357.812, "lm1b-base-untied": 466.508,
    "lm1b-large": 841.296, "lm1b-large-tf": 838.078, "lm1b-300m": 301.166, "ptb": 23.727,
}  # fmt: skip


@pytest.mark.parametrize("name", recipes.names())
def test_recipe(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.source
    config, train = recipe.model_config(None if recipe.data else 204), recipe.train_config()
    if name in MILLIONS or recipe.parameters is not None:
        with torch.device("meta"):
            millions = count_parameters(make_network(config)) / 1e6
        assert round(millions, 3) == MILLIONS.get(name, round(millions, 3))
        assert recipe.parameters in (None, round(millions, 2))
    if recipe.data:
        assert recipe.data["rule"] in RULES
    assert recipe.evaluate.get("method", "cached") in get_args(Method)
    if isinstance(config, RecurrentConfig):
        assert recipe.evaluate["method"] == "segments"
        return
    if recipe.evaluate.get("method", "cached") == "cached":
        assert not config.absolute
    if config.encoding == "learned":
        assert train.scored + train.context <= config.table_len
        assert recipe.evaluate["attn_len"] <= config.table_len
    if train.loss == "half":
        assert train.context == train.tgt_len // 2


def test_recipe_inherits_from_its_base() -> None:
    shaw, base = recipes.load("wt103-128m-no-recurrence-shaw-half"), recipes.load("wt103-128m")
    assert shaw.model == base.model | {"mem_len": 0, "encoding": "shaw", "table_len": 128}
    assert shaw.train == base.train | {"loss": "half"}
    assert "clamp_len" not in recipes.load("enwik8-al-rfou-12l").evaluate


def test_published_learning_rates() -> None:
    large = recipes.load("wt103-large").train_config()
    assert (large.warmup, large.steps, large.batch * large.tgt_len) == (16_000, 4_000_000, 49_152)
    words = recipes.load("lm1b-base").train_config()  # by hand: at its warm-up's end the cosine is at 20,000 of 500,000
    assert [learning_rate(n, words) for n in (0, 1, 10_000)] == pytest.approx([0.00025, 0.00025 / 20_000, 0.000125])
    assert learning_rate(20_000, words) == pytest.approx(0.00025 * 0.5 * (1 + math.cos(math.pi * 0.04)))
    assert recipes.load("text8-large").train_config().warmup == 0
    for name in ("wt103-large-tf", "lm1b-large-tf"):  # TensorFlow's cosine begins after the warm-up
        config = recipes.load(name).train_config()
        assert learning_rate(config.warmup, config) == pytest.approx(config.lr)


def test_published_evaluations() -> None:
    """(mem_len of same_length, tgt_len, clamp_len) in the scripts' eval lines."""
    published = {
        "enwik8-base": (2100, 80, 820), "enwik8-large": (3800, 128, 1000), "wt103-base": (640, 64, 400),
        "wt103-large": (1600, 128, 1000), "lm1b-base": (128, 32, None), "lm1b-large": (128, 32, None),
    }  # fmt: skip
    for name, lengths in published.items():
        how = recipes.load(name).evaluate
        assert how.get("method", "cached") == "cached"
        assert (how["attn_len"], how["segment"], how.get("clamp_len")) == lengths


def test_unknown_recipes() -> None:
    for name, nearest in (("wt103-bas", "wt103-base"), ("enwik8", "enwik8-18l"), ("labtop", "laptop")):
        with pytest.raises(TxlError, match=f"recipe must be one of those .*, got '{name}'; the nearest is {nearest}$"):
            recipes.load(name)
    with pytest.raises(TxlError, match="recipe laptop belongs to no data set: vocab_size must be given"):
        recipes.load("laptop").model_config()
