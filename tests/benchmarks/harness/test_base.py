"""Verdicts of a comparison with another version: a slow-down of 15% is found, noise is not."""

import random

import pytest

from harness.base import judge


def noisy(seconds: float, count: int, seed: int) -> list[float]:
    """Return times of a shared machine: 5% of noise, and every tenth time three times as long."""
    draw = random.Random(seed)
    return [seconds * draw.uniform(1, 1.05) * (3 if draw.random() < 0.1 else 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("slower", "regressed"), [(0.8, False), (1.0, False), (1.05, False), (1.15, True), (2.0, True)]
)
def test_verdict(slower: float, regressed: bool) -> None:
    for seed in range(10):
        verdict = judge(noisy(1.0, 40, seed), noisy(slower, 40, seed + 100))
        assert verdict.regressed == regressed
        assert verdict.low <= verdict.ratio <= verdict.high


def test_noise_is_no_regression() -> None:
    """Few rounds whose median happens to be high, in an interval that reaches below one."""
    base, head = [1.0] * 11, [0.7, 0.8, 0.9, 0.95, 0.98, 1.12, 1.2, 1.3, 1.4, 1.5, 1.6]
    verdict = judge(base, head)
    assert verdict.ratio > 1.1
    assert not verdict.regressed
