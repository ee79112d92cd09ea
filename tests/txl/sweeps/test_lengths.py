"""The search for attention lengths, against curves whose answers are known."""

import math
from collections.abc import Callable

import pytest

from txl.evaluation.evaluate import Lengths, Score, init_and_best
from txl.sweeps import tables
from txl.sweeps.lengths import next_length

Curve = Callable[[int], float]


def searched(curve: Curve, init: int, step: int, **options: object) -> tuple[list[int], Lengths]:
    """The lengths tried, in their order, and what is reported."""
    ppl: dict[int, float] = {}
    while (n := next_length(ppl, init, step, **options)) is not None:
        assert n not in ppl
        ppl[n] = curve(n)
    scores = [Score(n, 1, math.log(value), 1.0) for n, value in ppl.items()]
    return list(ppl), init_and_best(scores, init)


def test_a_curve_that_falls_to_a_level() -> None:
    """20 + 10 e^(-n / 100): upward until 20 more keys gain less than 0.1%, by closed form."""

    def curve(n: int) -> float:
        return 20 + 10 * math.exp(-n / 100)

    tried, found = searched(curve, 100, 20)
    # The gain of a step from n is 10 (1 - e^-0.2) e^(-n/100) / curve(n), a falling function of n.
    last = next(n for n in range(100, 2000, 20) if 10 * (1 - math.exp(-0.2)) * math.exp(-n / 100) < 1e-3 * curve(n))
    assert tried == list(range(100, last + 21, 20))
    assert (found.init.attn_len, found.best.attn_len) == (100, last + 20)
    assert found.shortest.attn_len == last == 460


def test_the_tables_step_ends_where_the_paper_does() -> None:
    """On exponentials through the three figures of the 151M row, and with the same decay through
    those of the first: a shorter step would end before a gain that the paper reports."""
    decay, table = 135, tables.find("table6")

    def fitted(init: int, low: float, best_len: int, best: float) -> Curve:
        size = (low - best) / (1 - math.exp((init - best_len) / decay))
        return lambda n: low - size * (1 - math.exp((init - n) / decay))

    standard, first = fitted(300, 23.35, 640, 23.09), fitted(256, 27.02, 500, 26.77)
    assert standard(450) == pytest.approx(23.16, abs=0.005)
    assert searched(standard, 300, table.step)[0][-1] == 620
    assert searched(standard, 300, 20)[0][-1] == 400
    assert searched(first, 256, table.step)[1].shortest.attn_len in (448, 512)


def test_a_curve_that_rises_beyond_training() -> None:
    """20 + |n - 70| / 10, best below training's 128, as absolute positions may be."""
    tried, found = searched(lambda n: 20 + abs(n - 68) / 10, 128, 20)
    assert tried == [128, 148, 108, 88, 68, 48]
    assert (found.best.attn_len, found.shortest.attn_len) == (68, 68)


def test_a_flat_curve_goes_down_to_the_last_step() -> None:
    tried, found = searched(lambda n: 30.0, 50, 20)
    assert tried == [50, 70, 30, 10]
    assert found.shortest.attn_len == 10


def test_a_curve_that_is_flat_down_to_120_keys() -> None:
    """As the paper's rows that are at their best with training's 128 or less."""
    tried, found = searched(lambda n: 30.0 if n >= 120 else 31.0, 128, 8)
    assert tried == [128, 136, 120, 112]
    assert (found.init.ppl, found.shortest.attn_len) == (pytest.approx(30.0), 120)


@pytest.mark.parametrize(("longest", "highest"), [(128, 128), (147, 128), (148, 148), (650, 648), (None, 668)])
def test_a_limit_is_never_exceeded(longest: int | None, highest: int) -> None:
    tried, _ = searched(lambda n: 100 * 0.99 ** min(n, 640), 128, 20, longest=longest, also=(200, 640))
    assert max(tried) == highest
    assert (200 in tried, 640 in tried) == (highest > 200, highest > 640)


def test_lengths_that_are_wanted_in_any_case() -> None:
    """They are scored after the search upward and count for the best; those below training's are
    what the search downward finds."""
    tried, found = searched(lambda n: 20.0 if n < 400 else 19.0, 300, 10, also=(150, 450, 640))
    assert tried == [300, 310, 450, 640]
    assert (found.best.attn_len, found.shortest.attn_len) == (450, 450)


def test_a_gain_of_just_a_thousandth_goes_on() -> None:
    assert next_length({10: 1000.0, 12: 999.0}, 10, 2) == 14
    assert next_length({10: 1000.0, 12: 999.1}, 10, 2) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_search_of_no_numbers_ends(value: float) -> None:
    ppl: dict[int, float] = {}
    while (n := next_length(ppl, 50, 20)) is not None:
        ppl[n] = value
    assert set(ppl) <= {50, 70, 30, 10}


def test_any_part_of_a_search_is_gone_on_with() -> None:
    """The next length is a function of what is known, so it is the same after a restart."""
    tried, _ = searched(lambda n: 20 + 10 * math.exp(-n / 40), 64, 5)
    for done in range(len(tried)):
        assert next_length({n: 20 + 10 * math.exp(-n / 40) for n in tried[:done]}, 64, 5) == tried[done]
