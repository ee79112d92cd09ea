"""Who fails gets no time and stops nobody; disturbed limits give no shares; records say it all."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_machine import FakeMachine

from harness.case import Case
from harness.comparison import Comparison, Entry, Implementation, Unavailable
from harness.runner import Runner
from harness.terminal import table
from report.records import load


def test_who_fails_gets_no_time_and_stops_nobody(tmp_path: Path) -> None:
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
    implementations = [Implementation(name, name, prepare) for name, prepare in prepared.items()]
    runner = Runner(FakeMachine(), tmp_path / "record.json", float("inf"))  # type: ignore[arg-type]
    rows = runner.of(Comparison("group", Case(), implementations, seconds=0, least=5))
    assert rows is not None
    assert list(rows) == list(prepared)
    assert rows["right"]["median_ms"] == 250
    assert rows["right"]["rounds"] == 5
    assert rows["right"]["share_of_operations"] == 0.5
    named = {"implementation": "wrong", "algorithm": "wrong", "role": "other"}
    assert rows["wrong"] == named | {"status": "failed", "error": "AssertionError: out is wrong"}
    assert rows["not installed"]["status"] == "unavailable"
    assert rows["not installed"]["error"] == "needs it"
    assert rows["cannot run"]["status"] == rows["dies later"]["status"] == "failed"
    record = json.loads((tmp_path / "record.json").read_text())
    assert [(row["implementation"], row["status"]) for row in record["rows"]] == [
        (name, row["status"]) for name, row in rows.items()
    ]
    assert load([tmp_path / "record.json"])[0].comparisons[0].rows.keys() == rows.keys()


@pytest.mark.parametrize(("slow", "disturbed"), [(0.29, False), (0.31, True)])
def test_a_disturbed_limit_gives_no_shares(slow: float, disturbed: bool) -> None:
    """Of the limit's rounds most take `slow` seconds, the fastest 0.25: up to 1.2 times is no
    sign."""
    limit = iter([0.25, slow, slow, slow])
    runs = [
        Implementation("ours", "rel_attention", lambda: Entry(lambda: 0.5, operations=1e9, warm_up=False), "ours"),
        Implementation(
            "limit", "arithmetic",
            lambda: Entry(lambda: next(limit), operations=1e9, limit="operations", warm_up=False), "limit",
        ),
    ]  # fmt: skip
    runner = Runner(FakeMachine(), None, float("inf"))  # type: ignore[arg-type]
    rows = runner.of(Comparison("group", Case(), runs, clock="own", seconds=0, least=4))
    assert rows is not None
    assert ("disturbed" in rows["limit"]) == disturbed
    assert ("share_of_operations" in rows["ours"]) != disturbed
    said = "\n".join(table(runner.done["group, "], rows))
    assert ("disturbed: the limit's median is 1.24 times its fastest round" in said) == disturbed


def test_deadline() -> None:
    runner = Runner(FakeMachine(), None, time.monotonic() - 1)  # type: ignore[arg-type]
    assert runner.of(Comparison("group", Case(), [Implementation("a", "a", lambda: Entry(lambda: None))])) is None
    assert not runner.rows


def test_two_of_one_name_are_refused() -> None:
    twice = [Implementation("a", "a", lambda: Entry(lambda: None))] * 2
    with pytest.raises(ValueError, match="group, : implementations need different names"):
        Comparison("group", Case(), twice)
