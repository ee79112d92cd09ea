"""A race: contestants that do the same work, each checked before it is timed, timed in turns, and recorded."""

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from interleave import interleaved
from machine import Machine, Run

Row = dict[str, Any]


class Unavailable(Exception):
    """A contestant cannot take part here (not installed, no such operator): the reason. It is skipped, not failed."""


class DeviceLost(Exception):
    """The device answers nothing any more, so nothing after it can be measured."""


@dataclass
class Entry:
    """One contestant, ready to run.

    Attributes:
        run: what is timed; with the clock "own" it returns its seconds itself.
        check: raises if the contestant computes something else; None for limits and yardsticks.
        per: tokens, calls: times are shown for one of them.
        operations, bytes: useful work of a run, for rates and for shares of a limit.
        limit: this is the machine's own limit of operations or bytes a second.
        warm_up: False counts the first run too: for runs so long that a warm-up is lost in them.
        most: rounds at most, if fewer than the race's.
        extra: more for the record; may be filled by `run`.
    """

    run: Callable[[], Any]
    check: Run | None = None
    per: float = 1.0
    operations: float = 0.0
    bytes: float = 0.0
    limit: Literal["operations", "bytes", None] = None
    warm_up: bool = True
    most: int | None = None
    extra: Row = field(default_factory=dict)


@dataclass(frozen=True)
class Race:
    """Contestants by name, ours first; each is prepared only when the race starts.

    clock: "device", "cold" (device, caches filled with something else before), "wall", or "own".
    """

    group: str
    case: str
    contestants: Mapping[str, Callable[[], Entry]]
    clock: Literal["device", "cold", "wall", "own"] = "device"
    seconds: float = 4.0
    least: int = 4
    most: int = 200


def races(listed: Callable[[Machine, bool], list[Race]]) -> Callable[[Any], Any]:
    """Makes a test function one test for each contestant of each race in listed(machine, full)."""

    def decorate(test: Any) -> Any:
        test.races = listed
        return test

    return decorate


class Races:
    """Runs each race once, keeps its rows, and writes the record after each, so that a run cut short leaves one."""

    def __init__(self, machine: Machine, record: Path | None, deadline: float, brief: bool = False) -> None:
        self.machine, self.record, self.deadline, self.brief = machine, record, deadline, brief
        self.about: Row = {}
        self.rows: dict[tuple[str, str], dict[str, Row]] = {}
        self.times: dict[tuple[str, str, str], list[float]] = {}

    def of(self, race: Race) -> dict[str, Row] | None:
        """Rows of the race by contestant; None if the time was up before it."""
        key = race.group, race.case
        if key not in self.rows:
            if time.monotonic() > self.deadline:
                return None
            self.about = self.about or self.machine.about()
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # a library's warning is no failure
                self.rows[key] = self._run(race)
            self._write()
            self.machine.free_memory()
        return self.rows[key]

    def _run(self, race: Race) -> dict[str, Row]:
        entries: dict[str, Entry] = {}
        rows: dict[str, Row] = {}
        runs: dict[str, Callable[[], float]] = {}

        def lost(name: str, error: Exception) -> None:
            # Text only: an exception would keep every tensor of its race alive.
            status = "unavailable" if isinstance(error, Unavailable) else "failed"
            text = f"{error}" if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            rows[name] = {"status": status, "error": text.strip()[:600] or "no message"}
            try:
                self.machine.synchronize()
            except Exception as broken:
                raise DeviceLost(f"{name} broke the device: {broken}") from None

        for name, prepare in race.contestants.items():
            try:
                if time.monotonic() > self.deadline:
                    raise Unavailable("the time is up: --deadline")
                entry = prepare()
                if entry.check is not None:
                    entry.check()
                clock = self._clock(race, entry)
                if entry.warm_up and not self.brief:
                    clock()  # what cannot run at this size shows here
            except Exception as error:
                lost(name, error)
                continue
            entries[name], runs[name] = entry, clock
        most = {name: min(race.most, entry.most or race.most) for name, entry in entries.items()}
        seconds, least = (0.0, 1) if self.brief else (race.seconds, race.least)
        times, errors = interleaved(runs, seconds=seconds, least=least, most=most) if runs else ({}, {})
        for name, failure in errors.items():
            lost(name, failure)
        for name, found in times.items():
            each = [t / entries[name].per for t in found]
            self.times[race.group, race.case, name] = each
            rows[name] = {"status": "measured"} | _statistics(each) | _rates(entries[name], each) | entries[name].extra
        _shares(rows)
        return {name: rows[name] for name in race.contestants}

    def _clock(self, race: Race, entry: Entry) -> Callable[[], float]:
        if race.clock == "own":
            return entry.run
        clock = getattr(self.machine, "on_device" if race.clock == "device" else race.clock)
        return lambda: clock(entry.run)

    def to_json(self) -> Row:
        rows = [
            {"group": group, "case": case, "contestant": name, **row}
            for (group, case), found in self.rows.items()
            for name, row in found.items()
        ]
        return {"about": self.about, "rows": rows}

    def _write(self) -> None:
        if self.record is None:
            return
        self.record.parent.mkdir(parents=True, exist_ok=True)
        half = self.record.with_suffix(".part")
        half.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(half, self.record)


def _statistics(times: list[float]) -> Row:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    spread = {"quartiles_ms": [low * 1e3, high * 1e3], "fastest_ms": min(times) * 1e3, "rounds": len(times)}
    return {"median_ms": statistics.median(times) * 1e3, **spread}


def _rates(entry: Entry, times: list[float]) -> Row:
    """Operations and bytes a second; a limit is what the machine can do, so its fastest round counts."""
    seconds = (min(times) if entry.limit else statistics.median(times)) * entry.per
    rates = {"gflops": entry.operations / seconds / 1e9, "gb_per_s": entry.bytes / seconds / 1e9}
    return {name: rate for name, rate in rates.items() if rate} | ({"limit": entry.limit} if entry.limit else {})


def _shares(rows: dict[str, Row]) -> None:
    """Adds each contestant's share of the limits that were measured in the same race."""
    for what, rate in (("operations", "gflops"), ("bytes", "gb_per_s")):
        limits = [row[rate] for row in rows.values() if row.get("limit") == what]
        for row in rows.values():
            if limits and rate in row and "limit" not in row:
                row[f"share_of_{what}"] = row[rate] / limits[0]
