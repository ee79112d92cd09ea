"""`make bench-compare`: finds a slow-down of 15%, and none where there is none."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from compare.__main__ import judge

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def noisy(seconds: float, count: int, seed: int) -> list[float]:
    """Times of a shared machine: 5% of noise, and now and then a hiccup."""
    draw = random.Random(seed)
    return [seconds * draw.uniform(1, 1.05) * (3 if draw.random() < 0.1 else 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("slower", "regressed"), [(0.8, False), (1.0, False), (1.05, False), (1.15, True), (2.0, True)]
)
def test_verdict(slower: float, regressed: bool) -> None:
    for seed in range(10):
        verdict = judge("a case", noisy(1.0, 40, seed), noisy(slower, 40, seed + 100))
        assert verdict.regressed == regressed
        assert verdict.low <= verdict.ratio <= verdict.high


def test_noise_alone_does_not_fail() -> None:
    """Few rounds whose median happens to be high, in an interval that reaches below one."""
    base, head = [1.0] * 11, [0.7, 0.8, 0.9, 0.95, 0.98, 1.12, 1.2, 1.3, 1.4, 1.5, 1.6]
    verdict = judge("a case", base, head)
    assert verdict.ratio > 1.1
    assert not verdict.regressed


def test_says_why_it_cannot_compare() -> None:
    """As `make bench-compare` calls it."""
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "compare", "no-such-revision"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 2
    assert "cannot compare" in done.stderr
    assert "no-such-revision" in done.stderr
