"""Interleaved timing: on a shared machine only times taken in turns can be compared.

All contestants of a group run round by round in one process; pytest-benchmark then gets each one's times through a clock
that replays them, so that its tables, records and comparisons work as usual.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any


def interleaved(
    contestants: dict[str, Callable[[], object]], *, seconds: float, least: int = 5, most: int = 200
) -> dict[str, list[float]]:
    """Seconds of each contestant, in rounds that take one of each; about `seconds` in all, after one warm-up round."""
    once = 0.0
    for run in contestants.values():
        run()  # compiles, allocates
        begin = time.perf_counter()
        run()
        once += time.perf_counter() - begin
    rounds = max(least, min(most, round(seconds / max(once, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times


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
