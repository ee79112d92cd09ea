"""Generation by CUDA graphs. On a GPU only: `pytest -m gpu`."""

import time
from typing import Any

import pytest
import torch

from txl import Engine, ModelConfig, TransformerXL
from txl.evaluation.decoding import DecodingEngine, generation_engine
from txl.evaluation.generate import Sampling, generate

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"n_layer": 4, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 256, "mem_len": 64}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def model(**options: Any) -> TransformerXL:
    network = TransformerXL(ModelConfig(vocab_size=500, dropout=0.0, **(SIZES | options)))
    for p in network.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1)
    return network.cuda().eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [
    {}, {"untie_r": True}, {"d_head": 41}, {"initial_memory": "zeros"}, {"encoding": "shaw", "table_len": 20},
    {"encoding": "shaw-released", "table_len": 20}, {"cutoffs": (100, 300)}, {"cutoffs": (100, 300), "div_val": 2},
], ids=str)  # fmt: skip
def test_replays_are_the_engines_steps(options: dict[str, Any], batch: int) -> None:
    """Before and after the cache is full, over laps; with a segment between, and another text."""
    network = model(**options)
    engine, graphed = Engine(network, batch, 100, 32), generation_engine(network, batch, 100, 32)
    assert isinstance(graphed, DecodingEngine)
    for _ in range(2):
        for length in (7, *[1] * 240, 20, *[1] * 40):
            tokens = torch.randint(500, (batch, length))
            torch.testing.assert_close(graphed.feed(tokens), engine.feed(tokens), **CLOSE)
        graphed.reset()
        engine.reset()
    assert sum(repeat is not None for repeat in graphed._repeats.values()) >= 32


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_replayed_step_does_not_wait() -> None:
    graphed, token = generation_engine(model(), 1, 400, 32), torch.zeros(1, 1, dtype=torch.long)
    for _ in range(100):
        graphed.feed(token)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(20):
            graphed.feed(token)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_likeliest_tokens_are_the_same() -> None:
    network, prompt = model(), torch.arange(5).unsqueeze(0)
    texts = [
        torch.cat(list(generate(make(network, 1, 400, 32), prompt, 200, Sampling(0.0))))
        for make in (Engine, generation_engine)
    ]
    same = (texts[0] == texts[1]).long().cumprod(0).sum()
    assert same > 50  # two that are nearly as likely may part the rest


def test_faster_at_batch_1() -> None:
    network, token = model(n_layer=12), torch.zeros(1, 1, dtype=torch.long)
    seconds = {}
    for make in (Engine, generation_engine):
        engine = make(network, 1, 400, 32)
        for _ in range(100):
            engine.feed(token)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            engine.feed(token)
        torch.cuda.synchronize()
        seconds[make.__name__] = (time.perf_counter() - began) / 200
    print(seconds)
    assert seconds["generation_engine"] < seconds["Engine"] / 1.5
