"""Timing in turns: on a shared machine only times taken in turns can be compared.

All implementations of a comparison run round by round in one process; pytest-benchmark then gets
each one's times through a clock that replays them, so that its tables, records and comparisons work
as usual.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def take_turns(
    runs: Mapping[str, Callable[[], float]], *, seconds: float, least: int, most: Mapping[str, int]
) -> tuple[dict[str, list[float]], dict[str, Exception]]:
    """What each run returned (its seconds), in rounds spread evenly over the run; and who failed.

    Each is given the same share of `seconds`, but no fewer than `least` rounds and no more than its
    `most`: a slow one sits out some rounds. They come warmed up; one that raises drops out.
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
        rounds[name] = min(most[name], max(least, share)) - 1
    total = max(1, *rounds.values()) if rounds else 0
    for turn in range(total):
        for name in runs:
            if (turn + 1) * rounds[name] // total > turn * rounds[name] // total:
                once(name)
    return {name: found for name, found in times.items() if name not in errors}, errors


class Replay:
    """A clock for pytest-benchmark, which moves by recorded times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded: Iterator[float] = iter(())

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.now += next(self.recorded)


CLOCK = Replay()


def replay(benchmark: Any, times: list[float]) -> None:
    """Hands recorded times to pytest-benchmark, in a test marked `benchmark(timer=CLOCK)`."""
    CLOCK.recorded = iter(times)
    benchmark.pedantic(CLOCK.run, rounds=len(times), iterations=1)
