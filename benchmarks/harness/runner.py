"""Runner of comparisons: it checks each implementation, times all of them in interleaved rounds,
and records the rows.

On a shared machine only interleaved times can be compared, so all implementations of a comparison
run round by round in one process. pytest-benchmark then gets each one's times through a clock that
replays them, so that its tables, records and comparisons work as usual.
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.case import SCHEMA, Row, add_shares
from harness.comparison import Comparison, Entry, Unavailable
from harness.machine import Machine
from txl.paths import replace_text


class DeviceLost(Exception):
    """The device no longer responds, so nothing more can be measured."""


class Runner:
    """Runs each comparison once, keeps its rows, and writes the record after each, so that an
    interrupted run has a record.

    Attributes:
        rows: rows by the comparison's title and the implementation's name.
        times: seconds of each round, by the same keys.
    """

    def __init__(self, machine: Machine, record: Path | None, deadline: float) -> None:
        self.machine, self.record, self.deadline = machine, record, deadline
        self.about: Row = {}
        self.done: dict[str, Comparison] = {}
        self.rows: dict[str, dict[str, Row]] = {}
        self.times: dict[tuple[str, str], list[float]] = {}

    def rows_of(self, comparison: Comparison) -> dict[str, Row] | None:
        """Return a comparison's rows by implementation; None if the time was up before it."""
        title = comparison.title
        if title not in self.rows:
            if time.monotonic() > self.deadline:
                return None
            self.about = self.about or {"schema": SCHEMA} | self.machine.about()
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # a library's warning is not a failure
                self.rows[title] = self._run(comparison)
            self.done[title] = comparison
            self._write()
            self.machine.free_memory()
        return self.rows[title]

    def _run(self, comparison: Comparison) -> dict[str, Row]:
        entries: dict[str, Entry] = {}
        rows: dict[str, Row] = {}
        runs: dict[str, Callable[[], float]] = {}

        def fail(name: str, error: Exception) -> None:
            # As text, because an exception would keep all tensors of its comparison alive.
            status = "unavailable" if isinstance(error, Unavailable) else "failed"
            text = f"{error}" if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            rows[name] = {"status": status, "error": text.strip()[:600] or "no message"}
            try:
                self.machine.synchronize()
            except Exception as broken:
                raise DeviceLost(f"{name} broke the device: {broken}") from None

        for implementation in comparison.implementations:
            name = implementation.name
            try:
                if time.monotonic() > self.deadline:
                    raise Unavailable("the time is up: --deadline")
                entry = implementation.prepare()
                if entry.check is not None:
                    entry.check()
                clock = self.machine.clock(comparison.clock, entry.run)
                if entry.warm_up and not self.machine.brief:
                    clock()  # raises here if it cannot run at this size
                    entry.extra |= self.machine.allocated(entry.run)
            except Exception as error:
                fail(name, error)
                continue
            entries[name], runs[name] = entry, clock
        maximum = {
            name: min(comparison.maximum, entry.maximum or comparison.maximum) for name, entry in entries.items()
        }
        seconds, minimum = (0.0, 1) if self.machine.brief else (comparison.seconds, comparison.minimum)
        times, errors = take_turns(runs, seconds=seconds, minimum=minimum, maximum=maximum, paired=comparison.paired)
        for name, failure in errors.items():
            fail(name, failure)
        for name, found in times.items():
            each = [t / entries[name].per for t in found]
            self.times[comparison.title, name] = each
            rows[name] = {"status": "measured"} | _statistics(each) | _rates(entries[name], each) | entries[name].extra
        whole = {x.name: x.to_json() | rows[x.name] for x in comparison.implementations}
        add_shares(list(whole.values()))
        return whole

    def to_json(self) -> Row:
        rows = [
            {"group": comparison.group, "case": comparison.case.to_json(), **row}
            for title, comparison in self.done.items()
            for row in self.rows[title].values()
        ]
        return {"about": self.about, "rows": rows}

    def _write(self) -> None:
        if self.record is None:
            return
        self.record.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.record, json.dumps(self.to_json(), indent=1) + "\n")


def _statistics(times: list[float]) -> Row:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    spread = {"quartiles_ms": [low * 1e3, high * 1e3], "fastest_ms": min(times) * 1e3, "rounds": len(times)}
    return {"median_ms": statistics.median(times) * 1e3, **spread}


def _rates(entry: Entry, times: list[float]) -> Row:
    """Return operations and bytes per second. A limit's rate is that of its fastest round, because
    it states what the machine can do."""
    seconds = (min(times) if entry.limit else statistics.median(times)) * entry.per
    rates = {"gflops": entry.operations / seconds / 1e9, "gb_per_s": entry.bytes / seconds / 1e9}
    return {name: rate for name, rate in rates.items() if rate} | ({"limit": entry.limit} if entry.limit else {})


def take_turns(
    runs: Mapping[str, Callable[[], float]],
    *,
    seconds: float,
    minimum: int,
    maximum: Mapping[str, int],
    paired: bool = False,
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """Time all runs in interleaved rounds; return the times of each in seconds, and the exceptions
    of those that failed.

    Each run gets the same share of `seconds`, but at least `minimum` and at most its `maximum`
    rounds, so a slow one skips some rounds, unless they are paired. Runs must be warmed up before;
    one that raises is not called again.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    errors: dict[str, Exception] = {}
    rounds: dict[str, int] = {}

    def once(name: str) -> float:
        begin = time.perf_counter()
        if name not in errors:
            try:
                times[name].append(runs[name]())
            except Exception as error:
                errors[name] = error
        return time.perf_counter() - begin

    for name in runs:
        cost = once(name)
        share = round(seconds / len(runs) / max(cost, 1e-9))
        rounds[name] = min(maximum[name], max(minimum, share)) - 1
    if paired:
        rounds = dict.fromkeys(rounds, min(rounds.values(), default=0))
    total = max(1, *rounds.values()) if rounds else 0
    for turn in range(total):
        for name in runs:
            if (turn + 1) * rounds[name] // total > turn * rounds[name] // total:
                once(name)
    return {name: found for name, found in times.items() if name not in errors}, errors


class Replay:
    """A clock for pytest-benchmark that advances by recorded times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded: Iterator[float] = iter(())

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += next(self.recorded)


CLOCK = Replay()


def replay(benchmark: Any, times: list[float]) -> None:
    """Pass recorded times to pytest-benchmark, in a test marked `benchmark(timer=CLOCK)`."""
    CLOCK.recorded = iter(times)
    benchmark.pedantic(CLOCK.run, rounds=len(times), iterations=1)


def header(machine: Machine) -> str:
    """Return a line that says what is compared, on which device and dtype, and how it is timed."""
    dtype = str(machine.dtype).removeprefix("torch.")
    ours = ", ".join(machine.decode_backends) or "no backend of its own here"
    threads = "" if machine.kind == "cuda" else f", {machine.threads} threads"
    others = "the original algorithm, SDPA and whole models"
    where = f"{machine.name}{threads}, {dtype}"
    return f"benchmarks: rel_attention ({ours}) against {others}; {where}; timed in turns, medians"
