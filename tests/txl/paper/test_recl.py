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
from txl.paper.recl import (
    Layout,
    NetworkLosses,
    effective_context,
    fingerprint,
    keep_losses,
    kept_losses,
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
        ({"contexts": [100, 200, 200, 300]}, "increasing"),
        ({"contexts": [100, 200]}, "contexts must be 4"),
        ({"losses": {}}, "at least one model"),
        ({"losses": {"a": np.ones((2, 3)), "b": np.ones((2, 4))}}, "alike for all models"),
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
    step=st.integers(1, 12), contexts=st.integers(2, 6), more=st.integers(1, 400), samples=st.integers(1, 500)
)  # fmt: skip
def test_a_layout_measures_every_position_at_every_context_once(step, contexts, more, samples):
    layout = Layout(step * contexts + more, samples, step, contexts)
    positions = layout.positions()
    assert len(set(positions.tolist())) == len(positions) == min(samples, more)
    assert positions.min() >= layout.longest
    assert positions.max() < layout.tokens
    seen = set()
    for run in layout.runs():
        for n, context in enumerate(layout.lengths[run.first : run.ends[-1] // step]):
            assert run.start + context == positions[run.place + n]
            seen.add((run.place + n, context))
    assert len(seen) == len(positions) * contexts
    assert layout.cost() == sum(run.ends[-1] for run in layout.runs())


def test_chains_share_runs():
    layout = Layout(1_000_000)  # 2,000 positions, 10 contexts of 100 to 1,000
    assert layout.cost() == 2_090_000  # one by one it is 11,000,000
    assert len(layout.chains()) == 20
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
    values = measure(predict, TEXT, layout, limit=predict.limit, batch_tokens=100)
    assert values.shape == (4, 40)
    for n, t in list(enumerate(layout.positions()))[::7]:
        for c, context in enumerate(layout.lengths):
            used = context if predict.limit is None else min(context, predict.limit)
            window = torch.from_numpy(TEXT[t - used : t].astype(np.int64)).unsqueeze(0)
            with torch.no_grad():
                hidden = model.read(window, mem_len=0).hidden[:, -1:]
                expected = float(model.softmax.nll(hidden, torch.tensor([[int(TEXT[t])]])))
            assert values[c, n] == pytest.approx(expected, rel=1e-9)


def test_limits_are_those_of_absolute_positions():
    assert NetworkLosses(as_language_model(small_model())).limit is None
    learned = small_model(mem_len=0, encoding="learned", table_len=14)
    assert NetworkLosses(as_language_model(learned)).limit == 8  # its last rows were never trained
    short = LanguageModel(learned, VOCABULARY, 16, 20, "none")
    assert NetworkLosses(short).limit == 14
    assert (
        NetworkLosses(as_language_model(small_model(mem_len=0, encoding="sinusoid"))).limit == 8
    )  # training's segment


def test_a_limit_that_is_a_length_of_its_own_is_measured_once():
    learned = small_model(mem_len=0, encoding="learned", table_len=14)
    predict = NetworkLosses(LanguageModel(learned, VOCABULARY, 16, 12, "none"))
    layout = Layout(len(TEXT), 40, 6, 4)
    done = []
    values = measure(predict, TEXT, layout, limit=predict.limit, watch=done.append)
    assert predict.limit == 12
    assert np.isfinite(values).all()
    assert np.array_equal(values[1], values[3])
    assert done[-1] == layout.cost(12)


def test_zero_states_are_no_context():
    layout = Layout(len(TEXT), 10, 6, 3)
    models = [as_language_model(small_model(initial_memory=kind)) for kind in ("empty", "zeros")]
    first, second = (measure(NetworkLosses(model), TEXT, layout) for model in models)
    assert np.array_equal(first, second)


def test_nothing_that_was_measured_otherwise_is_taken():
    other = TEXT.copy()
    other[0] ^= 1
    layout = Layout(len(TEXT), 10, 6, 3)
    marks = [
        fingerprint(*each)
        for each in (("a", TEXT, layout), ("b", TEXT, layout), ("a", other, layout), ("a", TEXT, Layout(300, 10, 5, 3)))
    ]
    assert len(set(marks)) == 4


def test_of_a_damaged_file_nothing_is_taken(tmp_path):
    layout, path = Layout(len(TEXT), 10, 6, 3), tmp_path / "kept.npz"
    assert np.isnan(kept_losses(path, layout)).all()
    measured = measure(Words(9), TEXT, layout)
    keep_losses(path, measured)
    assert np.array_equal(kept_losses(path, layout), measured)
    assert np.isnan(kept_losses(path, Layout(len(TEXT), 11, 6, 3))).all()
    content = path.read_bytes()
    for n in range(0, len(content), 7):
        path.write_bytes(content[:n] + bytes([content[n] ^ 0xFF]) + content[n + 1 :])
        found = kept_losses(path, layout)
        assert np.isnan(found).all() or np.array_equal(found, measured)
    with path.open("wb") as file:
        np.save(file, measured)  # of another kind
    assert np.isnan(kept_losses(path, layout)).all()


def test_what_is_before_a_context_does_not_matter():
    layout, predict = Layout(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    before = measure(predict, TEXT, layout).copy()
    n = 20
    t = int(layout.positions()[n])
    for c, context in enumerate(layout.lengths):
        changed = TEXT.copy()
        changed[: t - context] = (changed[: t - context] + 1) % 31
        after = measure(predict, changed, layout)
        assert after[c, n] == before[c, n]
        assert c + 1 == layout.contexts or after[c + 1, n] != before[c + 1, n]


def test_fewer_keys_than_context_still_reach_back_by_layers():
    layout = Layout(len(TEXT), 10, 6, 4)
    narrow, wide = (
        measure(NetworkLosses(as_language_model(small_model(window=window))), TEXT, layout) for window in (6, None)
    )
    np.testing.assert_allclose(narrow[0], wide[0], rtol=1e-12)
    assert not np.isclose(narrow[1], wide[1]).any()
    assert not np.isclose(narrow[1], narrow[0]).any()  # two layers of 6 keys see 11 tokens


@pytest.mark.parametrize("limit", [None, 12, 14])
def test_going_on_is_as_without_a_break(limit):
    layout, predict = Layout(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    batches = []
    whole = measure(predict, TEXT, layout, batch_tokens=60, limit=limit, watch=batches.append)
    assert batches[-1] == layout.cost(limit)

    def interrupted(done):
        if done == batches[4]:
            raise KeyboardInterrupt

    values = np.full_like(whole, np.nan)
    with pytest.raises(KeyboardInterrupt):
        measure(predict, TEXT, layout, batch_tokens=60, limit=limit, values=values, watch=interrupted)
    assert 0 < np.isfinite(values).sum() < values.size
    read = []

    def counted(tokens, ends, targets):
        read.append(tokens.numel())
        return predict(tokens, ends, targets)

    assert measure(counted, TEXT, layout, batch_tokens=60, limit=limit, values=values) is values
    assert np.array_equal(values, whole)
    assert sum(read) == batches[-1] - batches[4]  # nothing again


def test_shares_of_hard_positions_are_harder():
    layout, predict = Layout(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    values = measure(predict, TEXT, layout)
    hard, all_of_them = (effective_context({"m": values}, layout.lengths, r)["m"].short[0] for r in (0.1, 1.0))
    assert hard > all_of_them
    assert all_of_them == pytest.approx(math.exp(values[0].mean()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((100, 10, 10, 10), "the text has 100 tokens, too few for one position after a context of 100"),
        ((100, 0, 10, 4), "samples must be >= 1, got 0"),
        ((100, 1, 0, 4), "step must be >= 1, got 0"),
        ((100, 1, 10, 1), "contexts must be >= 2, got 1"),
    ],
)
def test_layouts_that_cannot_be(arguments, words):
    with pytest.raises(TxlError, match=words):
        Layout(*arguments)
