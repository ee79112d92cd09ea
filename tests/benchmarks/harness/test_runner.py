"""Failures, which leave the other implementations' times; disturbed limits; rounds; records."""

import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness.runner
from harness.case import Case, disturbed
from harness.comparison import Comparison, Entry, Implementation, Unavailable
from harness.machine import Machine
from harness.runner import Runner, take_turns
from report.records import load


class FakeMachine:
    """The part of a machine that a comparison needs."""

    kind, brief = "cpu", False
    clock, allocated = Machine.clock, Machine.allocated

    def about(self) -> dict[str, Any]:
        return {"date": "2000-01-01", "kind": "cpu", "device": "A processor", "threads": 2, "isa": "avx2"}

    def on_device(self, run: Callable[[], object]) -> float:
        run()
        return 0.25

    def synchronize(self) -> None:
        pass

    def free_memory(self) -> None:
        pass


def test_failed_implementation_gets_no_time(tmp_path: Path) -> None:
    def raises(error: Exception) -> Any:
        raise error

    late = iter(range(3))

    def dies_later() -> None:
        if next(late) == 2:
            raise MemoryError("no more")

    prepared: dict[str, Callable[[], Entry]] = {
        "right": lambda: Entry(lambda: None, operations=5e9),
        "limit": lambda: Entry(lambda: None, operations=10e9, limit="operations"),
        "wrong": lambda: Entry(lambda: None, functools.partial(raises, AssertionError("out is wrong"))),
        "not installed": lambda: raises(Unavailable("needs it")),
        "cannot run": lambda: Entry(functools.partial(raises, RuntimeError("no kernel"))),
        "dies later": lambda: Entry(dies_later),
    }
    implementations = [Implementation(name, prepare) for name, prepare in prepared.items()]
    runner = Runner(FakeMachine(), tmp_path / "record.json", float("inf"))  # type: ignore[arg-type]
    rows = runner.rows_of(Comparison("group", Case(), implementations, seconds=0, minimum=5))
    assert rows is not None
    assert list(rows) == list(prepared)
    assert rows["right"]["median_ms"] == 250
    assert rows["right"]["rounds"] == 5
    assert rows["right"]["share_of_operations"] == 0.5
    named = {"implementation": "wrong", "role": "other"}
    assert rows["wrong"] == named | {"status": "failed", "error": "AssertionError: out is wrong"}
    assert rows["not installed"]["status"] == "unavailable"
    assert rows["not installed"]["error"] == "needs it"
    assert rows["cannot run"]["status"] == rows["dies later"]["status"] == "failed"
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["implementation"], row["status"]) for row in record["rows"]] == [
        (name, row["status"]) for name, row in rows.items()
    ]
    assert load([tmp_path / "record.json"])[0].comparisons[0].rows.keys() == rows.keys()


@pytest.mark.parametrize(("slow", "other_work"), [(0.29, False), (0.31, True)])
def test_disturbed_limit_gives_no_shares(slow: float, other_work: bool) -> None:
    """Most of the limit's rounds take `slow` seconds, the fastest 0.25: up to 1.2 times as long is
    accepted."""
    limit = iter([0.25, slow, slow, slow])
    runs = [
        Implementation("ours", lambda: Entry(lambda: 0.5, operations=1e9, warm_up=False), "ours"),
        Implementation(
            "limit",
            lambda: Entry(lambda: next(limit), operations=1e9, limit="operations", warm_up=False), "limit",
        ),
    ]  # fmt: skip
    runner = Runner(FakeMachine(), None, float("inf"))  # type: ignore[arg-type]
    rows = runner.rows_of(Comparison("group", Case(), runs, clock="own", seconds=0, minimum=4))
    assert rows is not None
    assert ("disturbed" in rows["limit"]) == other_work
    assert ("share_of_operations" in rows["ours"]) != other_work
    assert ("the limit's median is 1.24 times its fastest round" in disturbed(list(rows.values()))) == other_work


def test_deadline() -> None:
    runner = Runner(FakeMachine(), None, time.monotonic() - 1)  # type: ignore[arg-type]
    assert runner.rows_of(Comparison("group", Case(), [Implementation("a", lambda: Entry(lambda: None))])) is None
    assert not runner.rows


def test_equal_names_are_refused() -> None:
    twice = [Implementation("a", lambda: Entry(lambda: None))] * 2
    with pytest.raises(ValueError, match="group, : implementations need different names"):
        Comparison("group", Case(), twice)


def test_rounds_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = 0.0
    monkeypatch.setattr(harness.runner, "time", SimpleNamespace(perf_counter=lambda: now))

    def take(name: str, seconds: float) -> float:
        nonlocal now
        now += seconds
        order.append(name)
        return seconds

    runs = {"fast": lambda: take("fast", 0.002), "slow": lambda: take("slow", 0.02)}
    times, errors = take_turns(runs, seconds=0.4, minimum=3, maximum={"fast": 50, "slow": 50})
    assert not errors
    assert times["slow"] == [0.02] * len(times["slow"])
    assert len(times["slow"]) == 10
    assert len(times["fast"]) == 50
    gaps = [b - a for a, b in itertools.pairwise(n for n, x in enumerate(order) if x == "slow")][1:]
    assert max(gaps) <= 2 * min(gaps)  # after the first round, which measures what each costs


@pytest.mark.parametrize(("paired", "rounds"), [(False, 4), (True, 2)])
def test_minimum_and_maximum(paired: bool, rounds: int) -> None:
    runs = {"a": lambda: 1.0, "b": lambda: 2.0}
    times, _ = take_turns(runs, seconds=0, minimum=4, maximum={"a": 10, "b": 2}, paired=paired)
    assert times == {"a": [1.0] * rounds, "b": [2.0] * 2}
