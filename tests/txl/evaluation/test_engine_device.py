"""Evaluation and generation on a GPU: `pytest -m gpu`."""

import copy
from typing import Any

import pytest
import torch

from txl import Engine, ModelConfig, TransformerXL, graphs
from txl.evaluation.generate import Sampling, generate

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"n_layer": 4, "d_model": 128, "n_head": 4, "d_head": 32, "d_inner": 256, "mem_len": 64}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def models(**options: Any) -> tuple[TransformerXL, TransformerXL]:
    """Return a model on the CPU and its copy on the GPU."""
    with torch.device("cpu"):
        network = TransformerXL(ModelConfig(vocab_size=500, dropout=0.0, **(SIZES | options)))
    for p in network.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1)
    return network.eval(), copy.deepcopy(network).cuda().eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", [
    {}, {"untie_r": True}, {"d_head": 41}, {"initial_memory": "zeros"}, {"encoding": "shaw", "table_len": 20},
    {"encoding": "shaw-released", "table_len": 20}, {"cutoffs": (100, 300)}, {"cutoffs": (100, 300), "div_val": 2},
], ids=str)  # fmt: skip
def test_steps_are_those_of_the_cpu(options: dict[str, Any], batch: int) -> None:
    """Before and after the cache is full, with a segment between, and after a reset."""
    here, there = (Engine(network, batch, 100, 32) for network in models(**options))
    for _ in range(2):
        for length in (7, *[1] * 120, 20, *[1] * 10):
            tokens = torch.randint(500, (batch, length), device="cpu")
            want = here.feed(tokens)
            assert want.device.type == "cpu"
            torch.testing.assert_close(there.feed(tokens.cuda()).cpu(), want, **CLOSE)
        here.reset()
        there.reset()


def test_greedy_generation_is_that_of_the_cpu() -> None:
    prompt, texts = torch.arange(5).unsqueeze(0), []
    for network in models():  # the first is on the CPU
        drawn = generate(Engine(network, 1, 400, 32), prompt.to(network.device), 200, Sampling(0.0))
        texts.append(torch.cat(list(drawn)).cpu())
    same = (texts[0] == texts[1]).long().cumprod(0).sum()
    assert same > 50  # two that are nearly as likely may part the rest


def test_graphs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the same steps issued by Python, before and after a reset."""
    network = models(initial_memory="zeros")[1].bfloat16()
    tokens = torch.randint(500, (40, 2, 32), device="cuda")
    found = []
    for warm_up in (10**9, 2):
        monkeypatch.setattr(graphs, "WARM_UP", warm_up)
        engine = Engine(network, 2, 100, 32, graph=True)
        losses = [engine.nll(part, part) for part in tokens]
        engine.reset()
        losses += [engine.nll(part[:, :1], part[:, :1]) for part in tokens]
        assert (len(engine._graphs._graphs) > 3) == (warm_up == 2)
        found.append(torch.cat(losses, 1))
    assert torch.equal(*found)


def test_growing_cache_is_refused_in_a_capture() -> None:
    engine = Engine(models()[1], 1, 100, 32, graph=False)
    tokens = torch.zeros(1, 32, dtype=torch.long, device="cuda")
    engine(tokens)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="cache must not be a KeyValueCache"):
        graphs.Captured(engine, [tokens])
    torch.cuda.synchronize()
