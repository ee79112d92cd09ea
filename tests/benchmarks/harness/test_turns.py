"""Runs take turns, spread evenly; a slow one sits out some."""

from types import SimpleNamespace

import pytest

from harness import turns
from harness.turns import take_turns


def test_equal_shares_of_the_time_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))

    def runner(name: str, seconds: float) -> float:
        nonlocal now
        now += seconds
        order.append(name)
        return seconds

    runs = {"fast": lambda: runner("fast", 0.002), "slow": lambda: runner("slow", 0.02)}
    times, errors = take_turns(runs, seconds=0.4, least=3, most={"fast": 50, "slow": 50})
    assert not errors
    assert times["slow"] == [0.02] * len(times["slow"])
    assert len(times["slow"]) == 10
    assert len(times["fast"]) == 50
    gaps = [b - a for a, b in zip(_places(order, "slow"), _places(order, "slow")[1:], strict=False)][1:]
    assert max(gaps) <= 2 * min(gaps)  # after the first round, which measures what each costs


def _places(order: list[str], name: str) -> list[int]:
    return [n for n, x in enumerate(order) if x == name]


def test_least_and_most() -> None:
    runs = {"a": lambda: 1.0, "b": lambda: 2.0}
    times, _ = take_turns(runs, seconds=0, least=4, most={"a": 10, "b": 2})
    assert times == {"a": [1.0] * 4, "b": [2.0] * 2}
