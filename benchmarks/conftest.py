"""Options of the benchmarks, the races they run, the record they leave and the table they print.

    pytest benchmarks/ --benchmark-only [--full | --brief] [--device cpu|cuda] [--record FILE] [--deadline SECONDS]

A benchmark is a test decorated with `@races(f)`, where f(machine, full) lists its races; it becomes one test for each
contestant of each race.
"""

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interleave import CLOCK, replay
from machine import Machine
from race import DeviceLost, Race, Races

MACHINE, RACES = pytest.StashKey[Machine](), pytest.StashKey[Races]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("txl-kernels")
    group.addoption("--full", action="store_true", help="also the paper's sizes: an hour on 2 cores")
    group.addoption(
        "--device", default="auto", choices=["auto", "cpu", "cuda", "rehearsal"], help="default: a GPU if any"
    )
    group.addoption("--record", default="", help="where the JSON goes; default benchmarks/results/, 'none' for nowhere")
    group.addoption("--brief", action="store_true", help="one round each, cold, no record: shows that everything runs")
    group.addoption("--deadline", type=float, default=float("inf"), help="start no race after so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    machine = config.stash[MACHINE] = Machine(config.getoption("--device"))
    where: Path | None = None
    brief, record = config.getoption("--brief"), config.getoption("--record")
    wanted = record or not (brief or config.getoption("--collect-only"))
    if wanted and record != "none":
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M%S")
        default = Path(__file__).parent / "results" / f"{now}-{machine.slug()}.json"
        where = Path(record or default).absolute()
    config.stash[RACES] = Races(machine, where, time.monotonic() + config.getoption("--deadline"), brief)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    listed: Callable[[Machine, bool], list[Race]] | None = getattr(metafunc.function, "races", None)
    if listed is None:
        return
    found = listed(metafunc.config.stash[MACHINE], metafunc.config.getoption("--full"))
    cases = [pytest.param(r, name, id=f"{r.group}-{r.case}-{name}") for r in found for name in r.contestants]
    metafunc.parametrize(("race", "contestant"), cases)


@pytest.fixture
def run(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Race, str], None]:
    """run(race, contestant): the race (once), then this contestant's times to pytest-benchmark, or its failure."""
    races = request.config.stash[RACES]

    def one(race: Race, contestant: str) -> None:
        try:
            rows = races.of(race)
        except DeviceLost as error:
            pytest.exit(str(error), returncode=3)
        if rows is None:
            pytest.skip("the time is up: --deadline")
        row = rows[contestant]
        if row["status"] == "unavailable":
            pytest.skip(row["error"])
        if row["status"] != "measured":
            pytest.fail(f"{contestant}: {row['error']}", pytrace=False)
        benchmark.group = f"{race.group}, {race.case}"
        benchmark.extra_info.update(row)
        replay(benchmark, races.times[race.group, race.case, contestant])

    return one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "function", None), "races", None):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    races = config.stash[RACES]
    if not races.rows:
        return
    terminalreporter.section("medians [quartiles], times taken in turns")
    for (group, case), rows in races.rows.items():
        terminalreporter.write_line(f"\n{group}, {case}")
        first = next(iter(rows.values())).get("median_ms")
        for name, row in rows.items():
            tokens = case.endswith("one token") and "median_ms" in row
            rate = f"  {1e3 / row['median_ms']:,.4g} tokens/s" if tokens else ""
            terminalreporter.write_line(f"  {name:<52}{_line(row, first)}{rate}")
    if races.record is not None:
        terminalreporter.write_line(f"\nrecord: {races.record}")


def _line(row: dict[str, Any], first: float | None) -> str:
    if "median_ms" not in row:
        return f"{row['status']}: {row['error'].splitlines()[0][:120]}"
    low, high = row["quartiles_ms"]
    parts = [f"{row['median_ms']:>11.4g} ms  [{low:.4g}, {high:.4g}]"]
    parts += [f"{row['median_ms'] / first:>7.2f}x"] if first else []
    parts += [f"{row[key]:.0f} {unit}" for key, unit in (("gflops", "GFLOP/s"), ("gb_per_s", "GB/s")) if key in row]
    shares = (("share_of_operations", "of the peak"), ("share_of_bytes", "of a plain read"))
    parts += [f"{row[key]:.0%} {words}" for key, words in shares if key in row]
    parts += [f"(the paper: {row['paper_speedup']:,}x)"] if "paper_speedup" in row else []
    parts += [f"{row['peak_mib']:.0f} MiB"] if "peak_mib" in row else []
    return "  ".join(parts)
