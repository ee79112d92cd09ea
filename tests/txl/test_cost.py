"""Counted operations: against torch's own counter, and pairs of queries and keys one by one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from txl import recipes
from txl.model import make_network
from txl.model.config import ModelConfig, config_from_json
from txl.recipes import cost
from txl.training.config import TrainConfig
from txl_kernels import attention_layer

SIZES = {"vocab_size": 50, "n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "dropout": 0.0}


def counted(config: object, length: int, batch: int, memory: bool) -> int:
    model = make_network(config).eval()
    past = None
    tokens = torch.randint(50, (batch, length))
    if memory:
        past = model.read(torch.randint(50, (batch, config.mem_len))).memory
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.softmax.nll(model.read(tokens, past).hidden, torch.zeros_like(tokens))
    return counter.get_total_flops()


@pytest.mark.parametrize("mem_len", [0, 5])
def test_projections_and_feed_forward_are_torchs_count(mem_len, monkeypatch):
    # Attention itself is counted apart: torch's counter knows our operator not.
    monkeypatch.setattr(attention_layer, "rel_attention", lambda q, *others, **options: q)
    config = ModelConfig(**SIZES, mem_len=mem_len)
    training = TrainConfig(batch=3, tgt_len=7)
    attention = 3 * cost.visible_pairs(7, mem_len, None) * 16 * 2 * 3
    # The counter watches modules: then a memory is projected with the segment, queries too.
    watched = 3 * mem_len * 16 * 16 * 2
    expected = 2 * (cost.segment_products(config, training) - attention + watched)
    assert counted(config, 7, 3, mem_len > 0) == pytest.approx(expected)


@pytest.mark.parametrize("network", ["lstm", "qrnn"])
def test_recurrent_networks_are_their_matrices(network):
    config = config_from_json({"network": network, "vocab_size": 50, "d_model": 16, "d_inner": 24})
    matrices = sum(p.numel() for p in make_network(config).blocks.parameters() if p.dim() == 2)
    assert cost.recurrent_products(config) == matrices


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("mem_len", [0, 3])
def test_pairs_one_by_one(window, mem_len):
    seen = 0
    for query in range(mem_len, mem_len + 6):
        seen += sum(1 for key in range(mem_len + 6) if key <= query and (window is None or key > query - window))
    assert cost.visible_pairs(6, mem_len, window) == seen


def test_a_softmax_of_bins_costs_less_than_a_whole_one():
    whole = recipes.load("wt103-base").model_config()
    assert cost.softmax_products(whole) < 0.4 * 410 * 267735
    one = ModelConfig(**SIZES)
    assert cost.softmax_products(one) == 16 * 50


def test_training_is_three_times_forward():
    recipe = recipes.load("enwik8-base")
    found = cost.training_cost(recipe.model_config(), recipe.train_config())
    assert found.tokens == 400_000 * 22 * 512
    assert found.total == pytest.approx(3 * found.token * found.tokens)
    # At least 6 operations a parameter and token, memory's keys and attention beside.
    assert 41e6 * 6 < found.total / found.tokens < 41e6 * 6 * 2
    assert found.hours(1e14) == pytest.approx(found.total / 3.6e17)
