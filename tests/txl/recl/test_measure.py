"""Exact contexts: each loss is that of one window of its own, however runs are shared."""

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
from txl.recl import Plan, effective_context, measure, store
from txl.recl.losses import Losses, finish
from txl.recl.networks import NetworkLosses
from txl.text.vocabulary import ByteVocabulary

TEXT = np.random.default_rng(0).integers(0, 31, 300).astype(np.uint8)
VOCABULARY = ByteVocabulary(bytes(range(31)))


@settings(max_examples=150, deadline=None)
@given(
    step=st.integers(1, 12), contexts=st.integers(2, 6), more=st.integers(1, 400), samples=st.integers(1, 500)
)  # fmt: skip
def test_a_plan_measures_every_position_at_every_context_once(step, contexts, more, samples):
    plan = Plan(step * contexts + more, samples, step, contexts)
    positions = plan.positions()
    assert len(set(positions.tolist())) == len(positions) == min(samples, more)
    assert positions.min() >= plan.longest
    assert positions.max() < plan.tokens
    seen = set()
    for run in plan.runs():
        for n, context in enumerate(plan.lengths[run.first : run.length // step]):
            assert run.start + context == positions[run.place + n]
            seen.add((run.place + n, context))
    assert len(seen) == len(positions) * contexts
    assert plan.cost() == sum(run.length for run in plan.runs())


def test_chains_share_runs():
    plan = Plan(1_000_000)  # 2,000 positions, 10 contexts of 100 to 1,000
    assert plan.cost() == 2_090_000  # one by one it is 11,000,000
    assert len(plan.chains()) == 20
    assert plan.positions().max() > 900_000  # spread over the text


class Words:
    """An oracle: the loss falls with every token of context up to `order`, and no further."""

    def __init__(self, order: int) -> None:
        self.order = order

    def __call__(self, tokens, ends, targets):
        known = torch.tensor([min(end, self.order) for end in ends], dtype=torch.float64)
        return (10.0 - known / 10).expand(len(tokens), -1)


def test_an_oracle_of_known_order_has_that_recl():
    plan = Plan(400, 20, 10, 8)
    losses = {f"{n}": finish(measure(Words(n), np.resize(TEXT, 400), plan)).values for n in (10, 30, 50, 200)}
    found = {name: effective_context({name: x}, plan.lengths)[name] for name, x in losses.items()}
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
    plan = Plan(len(TEXT), 40, 6, 4)
    values = finish(measure(predict, TEXT, plan, limit=predict.limit, batch_tokens=100)).values
    assert values.shape == (4, 40)
    for n, t in list(enumerate(plan.positions()))[::7]:
        for c, context in enumerate(plan.lengths):
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
    plan = Plan(len(TEXT), 40, 6, 4)
    done = finish(measure(predict, TEXT, plan, limit=predict.limit))
    assert predict.limit == 12
    assert np.isfinite(done.values).all()
    assert np.array_equal(done.values[1], done.values[3])
    assert done.tokens == plan.cost(12)


def test_zero_states_are_no_context():
    plan = Plan(len(TEXT), 10, 6, 3)
    models = [as_language_model(small_model(initial_memory=kind)) for kind in ("empty", "zeros")]
    first, second = (finish(measure(NetworkLosses(model), TEXT, plan)).values for model in models)
    assert np.array_equal(first, second)


def test_clamped_distances_and_windows_are_passed_on():
    plan = Plan(len(TEXT), 10, 6, 3)
    model = as_language_model(small_model())
    plain = finish(measure(NetworkLosses(model), TEXT, plan)).values
    clamped = finish(measure(NetworkLosses(model, clamp_len=3), TEXT, plan)).values
    own = finish(measure(NetworkLosses(as_language_model(small_model(clamp_len=3))), TEXT, plan)).values
    assert np.array_equal(clamped, own)
    assert not np.isclose(clamped, plain).any()
    windowed = finish(measure(NetworkLosses(as_language_model(small_model(window=4))), TEXT, plan)).values
    asked = finish(measure(NetworkLosses(model, attn_len=4), TEXT, plan)).values
    np.testing.assert_allclose(windowed, asked, rtol=1e-12)


def test_nothing_that_was_measured_otherwise_is_taken(tmp_path):
    plan, path = Plan(len(TEXT), 10, 6, 3), tmp_path / "kept.npz"
    measured = finish(measure(Words(9), TEXT, plan))

    def mark(checkpoint="a", text=TEXT, plan=plan, **settings):
        return store.fingerprint(checkpoint, text, plan, **({"clamp_len": None} | settings))

    store.save(path, measured, mark())
    kept = store.load(path, mark(), (3, 10))
    assert np.array_equal(kept.values, measured.values)
    assert kept[1:] == measured[1:]
    other = TEXT.copy()
    other[0] ^= 1
    marks = [mark("b"), mark(text=other), mark(plan=Plan(len(TEXT), 10, 5, 3)), mark(clamp_len=3)]
    assert len({mark(), *marks}) == 5
    for each in marks:
        assert store.load(path, each, (3, 10)) is None
    assert store.load(path, mark(), (3, 11)) is None
    content = path.read_bytes()
    for n in range(0, len(content), 7):  # of a damaged file nothing is taken, and nothing is raised
        path.write_bytes(content[:n] + bytes([content[n] ^ 0xFF]) + content[n + 1 :])
        found = store.load(path, mark(), (3, 10))
        assert found is None or found.values.shape == (3, 10)


def test_what_is_before_a_context_does_not_matter():
    plan, predict = Plan(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    before = finish(measure(predict, TEXT, plan)).values.copy()
    n = 20
    t = int(plan.positions()[n])
    for c, context in enumerate(plan.lengths):
        changed = TEXT.copy()
        changed[: t - context] = (changed[: t - context] + 1) % 31
        after = finish(measure(predict, changed, plan)).values
        assert after[c, n] == before[c, n]
        assert c + 1 == plan.contexts or after[c + 1, n] != before[c + 1, n]


def test_fewer_keys_than_context_still_reach_back_by_layers():
    plan = Plan(len(TEXT), 10, 6, 4)
    model = as_language_model(small_model())
    narrow = finish(measure(NetworkLosses(model, attn_len=6), TEXT, plan)).values
    wide = finish(measure(NetworkLosses(model), TEXT, plan)).values
    assert np.array_equal(narrow[0], wide[0])
    assert not np.isclose(narrow[1], wide[1]).any()
    assert not np.isclose(narrow[1], narrow[0]).any()  # two layers of 6 keys see 11 tokens


def test_going_on_is_as_without_a_break():
    plan, predict = Plan(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    whole = finish(measure(predict, TEXT, plan, batch_tokens=60))
    steps = measure(predict, TEXT, plan, batch_tokens=60)
    for _ in range(5):
        part = next(steps)
    kept = Losses(part.values.copy(), part.batches, part.tokens)
    rest = finish(measure(predict, TEXT, plan, batch_tokens=60, begun=kept))
    assert np.array_equal(rest.values, whole.values)
    assert (rest.batches, rest.tokens) == (whole.batches, whole.tokens)
    assert whole.tokens == plan.cost()


def test_shares_of_hard_positions_are_harder():
    plan, predict = Plan(len(TEXT), 40, 6, 4), NetworkLosses(as_language_model(small_model()))
    values = finish(measure(predict, TEXT, plan)).values
    hard, all_of_them = (effective_context({"m": values}, plan.lengths, r)["m"].short[0] for r in (0.1, 1.0))
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
def test_plans_that_cannot_be(arguments, words):
    with pytest.raises(TxlError, match=words):
        Plan(*arguments)
