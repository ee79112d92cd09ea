"""RECL by its definition (paper, Appendix C), written again as loops; its losses at exact contexts,
each that of one window of its own, however runs are shared."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import small_model

from txl.errors import TxlError
from txl.language_model import LanguageModel
from txl.model.config import RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.paper.recl import (
    Layout,
    NetworkLosses,
    effective_context,
    measure,
    relative_losses,
)  # fmt: skip
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
def test_relative_losses_are_the_definition(ratio):
    losses = some_losses()
    short, long = relative_losses(losses, ratio)
    for name in losses:
        for c in range(len(CONTEXTS) - 1):
            assert long[name][c] == pytest.approx(by_definition(losses, name, c, c + 1, ratio), rel=1e-12)
            assert short[c] == pytest.approx(by_definition(losses, name, c, c, ratio), rel=1e-12)  # equal for all


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_the_search_is_the_definition(ratio):
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


def test_a_better_model_at_short_contexts_raises_the_bar_for_all():
    slow = np.array([[2.0], [1.0], [0.5], [0.5]])
    assert effective_context({"slow": slow}, CONTEXTS)["slow"].length == 300
    rival = np.full((4, 1), 0.6)  # all that the first two steps gain, it has already
    group = effective_context({"slow": slow, "rival": rival}, CONTEXTS)
    assert group["slow"].length == group["rival"].length == 100
    assert group["slow"].gains[1] == pytest.approx(1 - math.exp(0.5 - 0.6))


def test_the_threshold_is_one_percent():
    for gain, length in ((0.0101, 200), (0.0099, 100)):
        steps = np.array([[1.0], [1 + math.log(1 - gain)], [1 + math.log(1 - gain)]])
        assert effective_context({"m": steps}, CONTEXTS[:3])["m"].length == length


def test_losses_of_any_size_have_a_perplexity():
    found = effective_context({"m": np.array([[900.0], [800.0]])}, CONTEXTS[:2])["m"]
    assert (found.short, found.gains[0], found.length) == ([math.inf], 1.0, 200)


def test_a_limit_is_the_longest_context():
    losses = {"short": np.array([[3.0], [2.0], [2.0], [2.0]]), "long": np.array([[3.0], [2.5], [1.0], [0.1]])}
    found = effective_context(losses, CONTEXTS, limits={"short": 128, "long": None})
    assert (found["short"].length, found["short"].reached_end) == (128, False)
    assert (found["long"].length, found["long"].reached_end) == (400, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratio": 0.0}, "ratio must be in"),
        ({"ratio": 1.5}, "ratio must be in"),
        ({"losses": {"a": np.full((4, 3), np.nan)}}, "losses of a are not all finite"),
    ],
)
def test_refusals(change, words):
    arguments = {"losses": some_losses(), "contexts": CONTEXTS, "ratio": 0.5} | change
    with pytest.raises(TxlError, match=words):
        effective_context(**arguments)


TEXT = np.random.default_rng(0).integers(0, 31, 300).astype(np.uint8)
VOCABULARY = ByteVocabulary(bytes(range(31)))


@settings(max_examples=150, deadline=None)
@given(
    step=st.integers(1, 12), contexts=st.integers(2, 6), more=st.integers(0, 4000), samples=st.integers(1, 500)
)  # fmt: skip
def test_positions_are_apart_and_their_runs_within_the_text(step, contexts, more, samples):
    layout = Layout(2 * step * contexts + more, samples, step, contexts)
    positions = layout.positions()
    assert len(positions) == min(samples, more // step + 1)
    assert positions.min() >= layout.longest
    assert positions.max() <= layout.tokens - layout.longest
    assert np.diff(positions).min(initial=step) == step


def test_each_context_of_a_position_is_read_once():
    """A loss that tells target and context: each lands in its own row and column."""
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


class Words:
    """An oracle: the loss falls with every token of context up to `order`, and no further."""

    def __init__(self, order: int) -> None:
        self.order = order

    def __call__(self, tokens, ends, targets):
        known = torch.tensor([min(end, self.order) for end in ends], dtype=torch.float64)
        return (10.0 - known / 10).expand(len(tokens), -1)


def test_an_oracle_of_known_order_has_that_recl():
    layout = Layout(400, 20, 10, 8)
    losses = {f"{n}": measure(Words(n), np.resize(TEXT, 400), layout) for n in (10, 30, 50, 200)}
    found = {name: effective_context({name: x}, layout.lengths)[name] for name, x in losses.items()}
    assert {name: each.length for name, each in found.items()} == {"10": 10, "30": 30, "50": 50, "200": 80}
    assert [name for name, each in found.items() if each.reached_end] == ["200"]


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


def test_zero_states_are_no_context():
    layout = Layout(len(TEXT), 10, 6, 3)
    models = [as_language_model(small_model(initial_memory=kind)) for kind in ("empty", "zeros")]
    first, second = (measure(NetworkLosses(model), TEXT, layout) for model in models)
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((199, 10, 10, 10), "the text has 199 tokens, fewer than two contexts of 100"),
        ((100, 0, 10, 4), "samples must be >= 1, got 0"),
        ((100, 1, 0, 4), "step must be >= 1, got 0"),
        ((100, 1, 10, 1), "contexts must be >= 2, got 1"),
    ],
)
def test_layouts_that_cannot_be(arguments, words):
    with pytest.raises(TxlError, match=words):
        Layout(*arguments)
