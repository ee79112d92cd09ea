"""RECL by its definition (paper, Appendix C) in loops; each loss is that of its own window."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import small_model

from txl.language_model import LanguageModel
from txl.model.config import RecurrentConfig
from txl.paper.recl import (
    Layout,
    NetworkLosses,
    effective_context,
    measure,
    relative_losses,
)  # fmt: skip
from txl.paper.recurrent import RecurrentNetwork
from txl.text.vocabulary import ByteVocabulary

CONTEXTS = [100, 200, 300, 400]


def some_losses(seed: int = 0, models: int = 3, positions: int = 50) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"m{i}": random.gamma(2.0, 2.0, (len(CONTEXTS), positions)) for i in range(models)}


def by_definition(losses: dict, name: str, c: int, later: int, ratio: float) -> float:
    """f_i(c, c') with c and c' as numbers of contexts."""
    count = len(losses[name][0])
    baseline = [min(x[c][t] for x in losses.values()) for t in range(count)]
    hardest = sorted(range(count), key=lambda t: -baseline[t])[: round(ratio * count)]
    return sum(min(baseline[t], losses[name][later][t]) for t in hardest) / len(hardest)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_relative_losses_by_definition(ratio):
    losses = some_losses()
    short, long = relative_losses(losses, ratio)
    for name in losses:
        for c in range(len(CONTEXTS) - 1):
            assert long[name][c] == pytest.approx(by_definition(losses, name, c, c + 1, ratio), rel=1e-12)
            assert short[c] == pytest.approx(by_definition(losses, name, c, c, ratio), rel=1e-12)  # equal for all


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_search_by_definition(ratio):
    losses = some_losses(3)
    found = effective_context(losses, CONTEXTS, ratio, threshold=0.2)
    for name in losses:
        c = 0
        while c + 1 < len(CONTEXTS):
            f, g = (math.exp(by_definition(losses, name, c, n, ratio)) for n in (c, c + 1))
            if (f - g) / f < 0.2:
                break
            c += 1
        assert found[name].length == CONTEXTS[c]
        assert found[name].reached_end == (c + 1 == len(CONTEXTS))
        assert found[name].gains[0] == pytest.approx(
            (found[name].short[0] - found[name].long[0]) / found[name].short[0]
        )


def test_threshold_is_one_percent():
    for gain, length in ((0.0101, 200), (0.0099, 100)):
        steps = np.array([[1.0], [1 + math.log(1 - gain)], [1 + math.log(1 - gain)]])
        assert effective_context({"m": steps}, CONTEXTS[:3])["m"].length == length


def test_limit_is_the_longest_context():
    losses = {"short": np.array([[3.0], [2.0], [2.0], [2.0]]), "long": np.array([[3.0], [2.5], [1.0], [0.1]])}
    found = effective_context(losses, CONTEXTS, limits={"short": 128, "long": None})
    assert (found["short"].length, found["short"].reached_end) == (128, False)
    assert (found["long"].length, found["long"].reached_end) == (400, True)


TEXT = np.random.default_rng(0).integers(0, 31, 300).astype(np.uint8)
VOCABULARY = ByteVocabulary(bytes(range(31)))


@settings(max_examples=150, deadline=None)
@given(
    step=st.integers(1, 12), contexts=st.integers(2, 6), more=st.integers(0, 4000), samples=st.integers(1, 500)
)  # fmt: skip
def test_positions_and_their_runs_lie_within_the_text(step, contexts, more, samples):
    layout = Layout(2 * step * contexts + more, samples, step, contexts)
    positions = layout.positions()
    assert len(positions) == min(samples, more // step + 1)
    assert positions.min() >= layout.longest
    assert positions.max() <= layout.tokens - layout.longest
    assert np.diff(positions).min(initial=step) == step


def test_each_context_of_a_position_is_read_once():
    """The losses encode target and context, so that each shows its row and column."""
    tokens = np.arange(5000, dtype=np.uint16)
    for limit, usable in ((None, 4), (17, 2)):
        layout, read = Layout(len(tokens), 250, 7, 4), []

        def predict(block, ends, targets, read=read):
            assert (targets == block[:, :1] + torch.tensor(ends)).all()
            read.append(block.numel())
            return targets.double() + torch.tensor(ends, dtype=torch.float64) / 100

        values = measure(predict, tokens, layout, limit=limit)
        used = np.minimum(np.array(layout.lengths), 7 * usable)
        np.testing.assert_array_equal(values, layout.positions() + used[:, None] / 100)
        assert sum(read) == (250 + 3 * (usable - 1)) * 7 * usable


def test_chains_share_runs():
    layout = Layout(1_000_000)  # 2,000 positions, 10 contexts of 100 to 1,000
    assert [count for _, count in layout.chains()] == [100] * 20
    assert layout.positions().max() > 900_000  # spread over the text


def as_language_model(network) -> LanguageModel:
    return LanguageModel(network, VOCABULARY, 16, 8, "none")


def networks():
    torch.manual_seed(0)
    for options in (
        {}, {"window": 5}, {"encoding": "shaw", "table_len": 9}, {"mem_len": 0, "encoding": "sinusoid"},
        {"mem_len": 0, "encoding": "learned", "table_len": 14},
    ):  # fmt: skip
        yield pytest.param(lambda options=options: small_model(**options), id=str(options))
    for kind in ("lstm", "qrnn"):
        config = RecurrentConfig(network=kind, vocab_size=31, n_layer=2, d_model=8, d_inner=12, dropout=0.0)
        yield pytest.param(lambda config=config: RecurrentNetwork(config).double().eval(), id=kind)


@pytest.mark.parametrize("make", list(networks()))
def test_each_loss_is_that_of_its_own_window(make):
    model = make()
    predict = NetworkLosses(as_language_model(model))
    layout = Layout(len(TEXT), 40, 6, 4)
    values = measure(predict, TEXT, layout, limit=predict.limit)
    assert values.shape == (4, 40)
    for n, t in list(enumerate(layout.positions()))[::7]:
        for c, context in enumerate(layout.lengths):
            used = context if predict.limit is None else min(context, predict.limit // 6 * 6)
            window = torch.from_numpy(TEXT[t - used : t].astype(np.int64)).unsqueeze(0)
            with torch.no_grad():
                hidden = model.read(window, mem_len=0).hidden[:, -1:]
                expected = float(model.softmax.nll(hidden, torch.tensor([[int(TEXT[t])]])))
            assert values[c, n] == pytest.approx(expected, rel=1e-9)


def test_limits_are_those_of_absolute_positions():
    assert NetworkLosses(as_language_model(small_model())).limit is None
    learned = small_model(mem_len=0, encoding="learned", table_len=14)
    assert NetworkLosses(as_language_model(learned)).limit == 8  # its last rows were never trained
    assert (
        NetworkLosses(as_language_model(small_model(mem_len=0, encoding="sinusoid"))).limit == 8
    )  # training's segment
