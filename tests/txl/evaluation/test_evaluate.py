"""The score of a split with windows, segments and caches, for every encoding and step size."""

import itertools
import math

import numpy as np
import pytest
import torch
from model_helpers import small_model

from txl import TransformerXL, recipes
from txl.errors import TxlError
from txl.evaluation.evaluate import (
    Reading,
    ResolvedReading,
    Score,
    bounded,
    default_method,
    evaluate,
    resolve,
    sliding_losses,
)
from txl.evaluation.generate import Sampling, generate
from txl.evaluation.readers import SegmentReader, WindowReader
from txl.model.config import config_from_json

SYSTEMS: dict[str, dict[str, object]] = {
    "relative": {},
    "shaw": {"encoding": "shaw", "table_len": 5},
    "shaw-released": {"encoding": "shaw-released", "table_len": 5},
    "sinusoid": {"encoding": "sinusoid"},
    "learned": {"encoding": "learned", "table_len": 9},
    "bins": {"cutoffs": (4, 9), "div_val": 2},
}
TEXT = np.random.default_rng(0).integers(0, 31, 40).astype(np.uint8)


def frozen(**options: object) -> TransformerXL:
    return small_model(**options).requires_grad_(False)


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("stride", [1, 2, 3, 9])
def test_any_stride_scores_each_token_once(options: dict[str, object], stride: int) -> None:
    """Windows that end every `stride` tokens score their last `stride` tokens."""
    model = frozen(mem_len=0, **options)
    whole, want = [7, *TEXT.tolist()], []
    for end in [*range(stride, 41, stride), *([40] if 40 % stride else [])]:
        window = torch.tensor([whole[max(end - 9, 0) : end]])
        log_probs = model(window)[0][0].log_softmax(-1)
        for n in range(len(want), end):
            want.append(-float(log_probs[n - end, whole[n + 1]]))
    got = torch.cat(list(sliding_losses(model, TEXT, 7, 9, stride, batch=3)))
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=0, atol=1e-11)


def test_cached_window_differs_from_a_sliding_one() -> None:
    """With N layers a window of keys reaches N times as far back as a window of tokens."""
    model = frozen(mem_len=0)
    cached = evaluate(model, TEXT, 7, Reading(9, method="cached"), batch=1)
    sliding = evaluate(model, TEXT, 7, Reading(9, method="sliding", segment=1))
    assert cached.tokens == sliding.tokens == 40
    assert abs(cached.nats - sliding.nats) > 1e-4
    one = frozen(mem_len=0, n_layer=1)
    assert evaluate(one, TEXT, 7, Reading(9, method="cached"), batch=1).nats == pytest.approx(
        evaluate(one, TEXT, 7, Reading(9, method="sliding", segment=1)).nats, rel=1e-9
    )


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
def test_window_reader_equals_batched_windows(options: dict[str, object]) -> None:
    model = frozen(mem_len=0, **options)
    reader = WindowReader(model, 1, 9, 2)
    tokens = torch.tensor([[7, *TEXT.tolist()[:-1]]])
    targets = torch.tensor([TEXT.tolist()])
    got = [reader.nll(x, y) for x, y in zip(tokens.split(2, 1), targets.split(2, 1), strict=True)]
    want = torch.cat(list(sliding_losses(model, TEXT, 7, 9, 2, batch=5)))
    torch.testing.assert_close(torch.cat(got, 1)[0], want, rtol=0, atol=1e-11)
    assert reader.window.size(1) == 9


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
def test_segments_use_the_models_memory(options: dict[str, object]) -> None:
    model = frozen(mem_len=6, **options)
    memory, total = None, 0.0
    whole = torch.tensor([7, *TEXT.tolist()])
    for first in range(0, 40, 5):
        logits, memory = model(whole[None, first : first + 5], memory)
        total -= float(logits[0].log_softmax(-1).gather(1, whole[first + 1 : first + 6, None]).sum())
    score = evaluate(model, TEXT, 7, Reading(11, method="segments", segment=5), batch=1)
    assert score.nats == pytest.approx(total / 40, rel=1e-9)


def test_memory_of_another_length_than_in_training() -> None:
    model, longer = frozen(mem_len=6), frozen(mem_len=12)
    a = evaluate(model, TEXT, 7, Reading(17, method="segments", segment=5), batch=1)
    b = evaluate(longer, TEXT, 7, Reading(17, method="segments", segment=5), batch=1)
    assert a.nats == b.nats


@pytest.mark.parametrize("method", ["cached", "segments"])
def test_zeros_have_the_length_of_evaluations_memory(method: str) -> None:
    """TensorFlow and Hugging Face start with zeros of the evaluation's mem_len, not training's."""
    model = frozen(mem_len=3, initial_memory="zeros", window=21)
    score = evaluate(model, TEXT[:1], 7, Reading(21, method=method, segment=1), batch=1)
    zeros = tuple(torch.zeros(1, 20, 16, dtype=torch.float64) for _ in range(2))
    logits, _ = model(torch.tensor([[7]]), zeros)
    assert score.nats == pytest.approx(-float(logits[0, 0].log_softmax(-1)[TEXT[0]]), rel=1e-9)


def test_limit_of_zeros() -> None:
    """Zeros are keys, so a number of them that fits is never changed."""
    zeros, empty = frozen(initial_memory="zeros"), frozen()
    for reading in (ResolvedReading("cached", 2**16, 9), ResolvedReading("segments", 2**16, 2**15)):
        assert bounded(reading, zeros, 9) == reading
        assert bounded(reading, empty, 9) == (reading.method, 9, 9)
        far = reading._replace(attn_len=2**16 + 1)
        assert bounded(far, zeros, 2**16 + 1) == far
        with pytest.raises(TxlError, match=r"attn_len must be at most 65,536 for a text of 9 tokens .*, got 65,537"):
            bounded(far, zeros, 9)
    assert bounded(ResolvedReading("cached", 20, 10**9), zeros, 9) == ("cached", 20, 9)
    assert bounded(ResolvedReading("sliding", 10**9, 1), zeros, 9) == ("sliding", 9, 1), "it begins without memory"


def test_counting_as_released() -> None:
    """41 tokens, 4 streams of 10: the last is left out, the first of each is an input only."""
    model = frozen()
    tokens = np.append(TEXT, 3).astype(np.uint8)
    score = evaluate(model, tokens, 7, Reading(9, segment=4), batch=4, counting="released")
    assert score.tokens == 36
    want = [evaluate(model, tokens[n + 1 : n + 10], int(tokens[n]), Reading(9), batch=1) for n in (0, 10, 20, 30)]
    assert score.nats == pytest.approx(sum(s.nats for s in want) / 4, rel=1e-9)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_generates(name: str) -> None:
    model = frozen(mem_len=0, **SYSTEMS[name])
    reader = WindowReader(model, 2, 9)
    prompt = torch.tensor([TEXT[:12].tolist(), TEXT[12:24].tolist()])
    drawn = torch.stack(list(generate(reader, prompt, 15, Sampling(0.0))), 1)
    text = prompt
    for n in range(15):  # each token is the likeliest after the last nine
        likeliest = model(text[:, -9:])[0][:, -1].argmax(-1)
        assert torch.equal(likeliest, drawn[:, n])
        text = torch.cat([text, drawn[:, n : n + 1]], 1)


def test_default_methods() -> None:
    assert default_method(frozen()) == "cached"
    assert default_method(frozen(encoding="shaw", table_len=3)) == "cached"
    assert default_method(frozen(mem_len=0)) == "sliding", "without recurrence keys must not carry over"
    assert default_method(frozen(encoding="sinusoid")) == "segments"
    assert default_method(frozen(encoding="sinusoid", mem_len=0)) == "sliding"


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize(
    ("recipe", "words"), [("enwik8-large", 204), ("wt103-large", 267_735), ("lm1b-large", 793_471), ("ptb", 10_000)]
)
def test_cached_segments_take_up_to_a_gibibyte(recipe: str, words: int, batch: int) -> None:
    """512 tokens, halved until they fit, by the largest bin of the softmax."""
    given = recipes.load(recipe).model | {"vocab_size": words}
    config = config_from_json(given)
    edges = [0, *config.cutoffs, words]
    largest = max(b - a for a, b in itertools.pairwise(edges))
    token = 4 * (2 * largest + 4 * config.n_head * config.d_head + 2 * config.d_inner + 4 * config.d_model)
    segment = config.cached_segment(batch)
    assert token * batch * segment <= 2**30
    assert segment == 512 or token * batch * 2 * segment > 2**30
    assert resolve(Reading(9), frozen(), batch=batch).segment == frozen().config.cached_segment(batch)


def test_resolved_readings() -> None:
    """Given options are kept; the others come from the method, which the model decides."""
    of = {name: frozen(**SYSTEMS[name]) for name in ("relative", "sinusoid")}
    cases = [
        ("relative", Reading(), ("cached", 20, 512)),
        ("relative", Reading(7, "segments", 2), ("segments", 7, 2)),
        ("relative", Reading(method="sliding"), ("sliding", 20, 1)),
        ("sinusoid", Reading(), ("segments", 20, 5)),
        ("sinusoid", Reading(segment=4), ("segments", 20, 4)),
    ]
    for name, asked, want in cases:
        assert resolve(asked, of[name], 20, 5) == want
    assert resolve(Reading(9), of["relative"]) == ("cached", 9, 512)
    for name, model in of.items():
        whole = resolve(Reading(9), model)
        assert evaluate(model, TEXT, 7, whole).nats == evaluate(model, TEXT, 7, Reading(9)).nats, name


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"encoding": "sinusoid"}, {"method": "cached"}, "encoding 'sinusoid' puts places into the hidden states"),
        ({}, {"method": "guess"}, "method must be one of cached, segments, sliding, got 'guess'"),
        ({}, {"method": "sliding", "counting": "released"}, "scores every token"),
        ({}, {"attn_len": None}, "a reading needs attn_len, the keys that a token sees"),
        (
            {"encoding": "learned", "table_len": 6, "mem_len": 0},
            {},
            r"a window of 9 tokens is beyond the model's 6 learned positions \(table_len\)",
        ),
    ],
)
def test_invalid_evaluations(options: dict[str, object], arguments: dict[str, object], message: str) -> None:
    how = dict(arguments)
    counting = how.pop("counting", "all")
    with pytest.raises(TxlError, match=message):
        evaluate(frozen(**options), TEXT, 7, Reading(**({"attn_len": 9} | how)), counting=counting)


def test_invalid_readers() -> None:
    model = frozen(encoding="sinusoid")
    with pytest.raises(TxlError, match="stride must be from 1 to the window's 4 tokens, got 5"):
        WindowReader(model, 1, 4, 5)
    with pytest.raises(TxlError, match="mem_len must be >= 0, got -1"):
        SegmentReader(model, 1, -1, 4)
    for reader in (WindowReader(model, 1, 9, 4), SegmentReader(model, 1, 4, 4)):
        with pytest.raises(TxlError, match="a segment has at most max_segment = 4 tokens, got 5"):
            reader(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(TxlError, match="the prompt is empty"):
        WindowReader(model, 1, 4).feed(torch.zeros(1, 0, dtype=torch.long))


def test_evaluation_keeps_the_models_mode() -> None:
    model = frozen().train()
    for method in ("cached", "segments", "sliding"):
        score = evaluate(model, TEXT, 7, Reading(9, method=method, segment=3))
        assert model.training
        assert math.isfinite(score.nats)


@pytest.mark.parametrize("name", ["relative", "shaw", "sinusoid"])
def test_attn_len_replaces_the_models_window(name: str) -> None:
    """Lengths beyond the window would otherwise have the window's score."""
    own, free = (frozen(mem_len=6, window=w, **SYSTEMS[name]) for w in (4, None))
    for attn_len in (6, 11):
        a = evaluate(own, TEXT, 7, Reading(attn_len, method="segments", segment=5), batch=1)
        wide = frozen(mem_len=6, window=attn_len, **SYSTEMS[name])
        assert a.nats == evaluate(wide, TEXT, 7, Reading(attn_len, method="segments", segment=5), batch=1).nats
    assert own.layers[0].attention.window == 4
    assert evaluate(own, TEXT, 7, Reading(9, method="sliding", segment=3)).nats == pytest.approx(
        evaluate(free, TEXT, 7, Reading(9, method="sliding", segment=3)).nats
    )


@pytest.mark.parametrize("segment", [1, 5, 64])
def test_score_does_not_depend_on_the_segment(segment: int) -> None:
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 31, 150).astype(np.uint8)
    score = evaluate(model, tokens, 0, Reading(7, segment=segment), batch=2)
    want = evaluate(model, tokens, 0, Reading(7, segment=33), batch=2)
    assert score.tokens == 150
    assert math.isclose(score.nats, want.nats, rel_tol=1e-6)
    assert math.isclose(score.bpc, score.nats / math.log(2))


def test_units_of_a_score() -> None:
    s = Score(8, tokens=100, nats=2.0, seconds=2.0)
    assert (s.ppl, s.tokens_per_s) == (pytest.approx(math.exp(2)), 50)
    assert Score(8, tokens=100, nats=1000.0, seconds=2.0).ppl == math.inf
