"""Learning rates at chosen updates, by the formulas of each schedule's original code."""

import math

import pytest

from txl.training.config import TrainConfig, learning_rate


def rates(**options: object) -> list[float]:
    config = TrainConfig(steps=100, lr=1.0, **options)
    return [learning_rate(n, config) for n in range(100)]


def test_warm_up_then_cosine_over_the_rest() -> None:
    found = rates(warmup=10, min_lr_ratio=0.1)
    assert found[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert found[10] == 1.0
    assert found == sorted(found[:10]) + sorted(found[10:], reverse=True)
    assert found[55] == pytest.approx(0.55)
    assert math.isclose(learning_rate(100, TrainConfig(steps=100, lr=1.0, warmup=10, min_lr_ratio=0.1)), 0.1)


def test_constant() -> None:
    assert rates(warmup=4, schedule="constant") == [0.25, 0.5, 0.75] + [1.0] * 97


def test_default_warm_up_is_a_thirtieth() -> None:
    assert TrainConfig(steps=300, warmup=None).warmup_updates == 10
    assert TrainConfig(steps=3, warmup=None).warmup_updates == 0
