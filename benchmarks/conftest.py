"""pytest options of the benchmarks, and hooks that run the comparisons, write the record and print
the table.

    pytest benchmarks/ --benchmark-only [--full | --brief] [--device cpu|cuda] [--record FILE]
                       [--deadline SECONDS] [--base=REVISION]

A benchmark is a function f(machine, full) that returns a list of comparisons, decorated with
`@comparisons(..)`; it becomes one test for each implementation of each comparison.
"""

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import txl
from harness.base import BASE, Verdict, Versions, judge
from harness.case import disturbed, sdpa_note
from harness.comparison import Comparison
from harness.machine import Machine
from harness.runner import CLOCK, DeviceLost, Runner, header, replay
from report.tables import cell

MACHINE, RUNNER, VERSIONS = pytest.StashKey[Machine](), pytest.StashKey[Runner](), pytest.StashKey[Versions | None]()
DEVICES = ["auto", "cpu", "cuda", "interpreter"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("txl-kernels")
    group.addoption("--full", action="store_true", help="also the paper's sizes: an hour on 2 cores")
    group.addoption("--device", default="auto", choices=DEVICES, help="default: a GPU if any")
    group.addoption("--record", default="", help="where the JSON goes; default benchmarks/results/, 'none' for nowhere")
    group.addoption("--brief", action="store_true", help="one round each, cold, no record: shows that everything runs")
    group.addoption("--base", help="a git revision, or a folder of packages: time ours and theirs, in turns; no record")
    group.addoption("--deadline", type=float, default=float("inf"), help="start no comparison after so many seconds")


def pytest_configure(config: pytest.Config) -> None:
    if txl.missing is not None:
        raise pytest.UsageError(f"the benchmarks run its models: {txl.missing}")
    machine = config.stash[MACHINE] = Machine(config.getoption("--device"), config.getoption("--brief"))
    base, versions = config.getoption("--base"), None
    if base is not None:
        try:
            versions = Versions(base, machine, config.getoption("--full"))
        except RuntimeError as error:
            raise pytest.UsageError(f"cannot compare with {base}: {error}") from None
        config.add_cleanup(versions.close)
    config.stash[VERSIONS] = versions
    config.option.benchmark_columns = config.option.benchmark_columns or ["median", "rounds"]
    where: Path | None = None
    record = config.getoption("--record")
    wanted = record or not (machine.brief or config.getoption("--collect-only"))
    if wanted and record != "none" and base is None:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M%S")
        default = Path(__file__).parent / "results" / f"{now}-{machine.slug()}.json"
        where = Path(record or default).absolute()
    config.stash[RUNNER] = Runner(machine, where, time.monotonic() + config.getoption("--deadline"))


@pytest.hookimpl(trylast=True)  # the hook that runs last is shown first
def pytest_report_header(config: pytest.Config) -> str:
    return header(config.stash[MACHINE])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    listed: Callable[[Machine, bool], list[Comparison]] | None = getattr(metafunc.function, "comparisons", None)
    if listed is None:
        return
    found = listed(metafunc.config.stash[MACHINE], metafunc.config.getoption("--full"))
    if (versions := metafunc.config.stash[VERSIONS]) is not None:
        found = versions.pairs(f"groups.{Path(metafunc.module.__file__).stem}", metafunc.definition.originalname, found)
    cases = [pytest.param(c, x.name, id=f"{c.title}-{x.name}") for c in found for x in c.implementations]
    metafunc.parametrize(("comparison", "implementation"), cases)


@pytest.fixture
def run(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Comparison, str], None]:
    """A function run(comparison, implementation). It measures the whole comparison once, then
    passes the times of this implementation to pytest-benchmark, or raises its failure."""
    runner = request.config.stash[RUNNER]

    def one(comparison: Comparison, implementation: str) -> None:
        try:
            rows = runner.rows_of(comparison)
        except DeviceLost as error:
            pytest.exit(str(error), returncode=3)
        if rows is None:
            pytest.skip("the time is up: --deadline")
        row = rows[implementation]
        if row["status"] == "unavailable":
            pytest.skip(row["error"])
        if row["status"] != "measured":
            pytest.fail(f"{implementation}: {row['error']}", pytrace=False)
        benchmark.group = comparison.title
        benchmark.extra_info.update(row)
        replay(benchmark, runner.times[comparison.title, implementation])
        found = verdict(runner, comparison.title)
        if found is not None and found.regressed and not implementation.endswith(BASE):
            pytest.fail(f"slower: {found}", pytrace=False)

    return one


def verdict(runner: Runner, title: str) -> Verdict | None:
    """Return how this version's time compares with the base's, if both were measured more than
    once."""
    times = {name.endswith(BASE): x for (at, name), x in runner.times.items() if at == title}
    if len(times) < 2 or len(times[True]) < 2:
        return None
    return judge(times[True], times[False])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "function", None), "comparisons", None):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    runner = config.stash[RUNNER]
    if not runner.rows:
        return
    terminalreporter.section("medians [quartiles] in milliseconds, times taken in turns")
    if note := sdpa_note(runner.about["device"], runner.about["isa"]):
        terminalreporter.write_line(note)
    for title, rows in runner.rows.items():
        first, why = next(iter(rows.values())), disturbed(list(rows.values()))
        terminalreporter.write_line(f"\n{title}" + f"  (disturbed: {why})" * bool(why))
        for name, row in rows.items():
            terminalreporter.write_line(f"  {name:<52}{cell(row, first, spread=True)}")
        if (found := verdict(runner, title)) is not None:
            terminalreporter.write_line(f"  {found}" + "  SLOWER" * found.regressed)
    if runner.record is not None:
        terminalreporter.write_line(f"\nrecord: {runner.record}")
