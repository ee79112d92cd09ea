"""Measures by their formulas."""

import math

import pytest

from txl.evaluation.score import Score, init_and_best


def score(attn_len: int, nats: float, **more: int) -> Score:
    return Score(attn_len, tokens=100, nats=nats, seconds=2.0, **more)


def test_measures() -> None:
    s = score(8, 2.0, sentences=25)
    assert s.bpc == pytest.approx(2 / math.log(2))
    assert s.ppl == pytest.approx(math.exp(2))
    assert s.ppl_with_starts == pytest.approx(math.exp(2 * 100 / 125))
    assert s.tokens_per_s == 50
    assert score(8, 2.0).ppl_with_starts is None
    assert score(8, 1000.0).ppl == math.inf


def test_one_billion_words_two_counts_as_published() -> None:
    """21.8 in TensorFlow's counting is about 24.5 in PyTorch's: a sentence has some 26 tokens."""
    nats = math.log(24.5)
    s = Score(32, tokens=159_658, nats=nats, seconds=1.0, sentences=6_075)
    assert s.ppl == pytest.approx(24.5)
    assert s.ppl_with_starts == pytest.approx(21.8, abs=0.3)


def test_init_best_and_shortest() -> None:
    """Table 6's columns; 26.77 at 500 keys, where 460 have 26.79, within 0.1% of it."""
    ppl = {128: 27.02, 256: 26.90, 460: 26.79, 500: 26.77, 600: 26.78}
    found = init_and_best([score(n, math.log(p)) for n, p in ppl.items()], trained=128)
    assert (found.init.attn_len, found.best.attn_len, found.shortest.attn_len) == (128, 500, 460)
    with pytest.raises(ValueError, match=r"must hold training's attention length 64, got \[128, 256"):
        init_and_best([score(n, math.log(p)) for n, p in ppl.items()], trained=64)
