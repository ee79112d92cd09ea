"""After the run: each group's contestants with their ratio to ours and their share of the machine's limit."""

import statistics
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what takes minutes: the longest memory")


ROWS: dict[str, list[dict[str, Any]]] = {}


@pytest.fixture
def report(benchmark: Any) -> Any:
    """report(group, contestant, times, limit): a row of the closing table, and of the benchmark's record."""

    def add(group: str, contestant: str, times: list[float], **extra: Any) -> None:
        quartiles = statistics.quantiles(times, n=4)
        row = {"contestant": contestant, "median_ms": statistics.median(times) * 1e3, "rounds": len(times)}
        row |= {"quartiles_ms": [quartiles[0] * 1e3, quartiles[2] * 1e3], **extra}
        ROWS.setdefault(group, []).append(row)
        benchmark.group = group
        benchmark.extra_info.update(row)

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("medians, times taken in turns")
    for group, rows in ROWS.items():
        terminalreporter.write_line(f"\n{group}")
        first = rows[0]["median_ms"]
        for row in rows:
            low, high = row["quartiles_ms"]
            line = f"  {row['contestant']:<34}{row['median_ms']:>10.3f} ms  [{low:.3f}, {high:.3f}]"
            line += f"{row['median_ms'] / first:>8.2f}x" + (f"  {row['share']}" if row.get("share") else "")
            terminalreporter.write_line(line)
