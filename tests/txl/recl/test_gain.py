"""RECL by its definition (paper, Appendix C), written again as loops."""

import math

import numpy as np
import pytest

from txl.errors import TxlError
from txl.recl import effective_context, relative_losses

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
