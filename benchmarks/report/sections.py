"""The sections of benchmarks/REPORT.md: one a machine, each group of comparisons in full."""

from collections.abc import Callable
from typing import Any

from harness import paper
from harness.case import DIRECTIONS, Case
from report import libraries, plots
from report.formats import number, sources, spread, table, times
from report.records import Device, Measured, comparable, ratio

Row = dict[str, Any]
INTRODUCTION = """# Benchmarks

Written by `make report` from the records in `results/`; not edited by hand. How to measure:
`pytest benchmarks/ --benchmark-only` (`--full` for the paper's sizes), in which implementations run
in turns, each compared with a float64 reference before it is timed.

A cell is the median of its rounds, with quartiles in brackets. *x* is the time as a multiple of the
first implementation's. Shares are of the limit measured in the same comparison: multiply-adds in
registers (on a GPU, the library's matrix product) for the useful operations, visible pairs only; a
plain read (a copy) for the bytes that must be read. A limit does the same in every round: where its
median is over 1.2 times its fastest round, the comparison was disturbed, and no shares are given.
"""


def section(device: Device) -> list[str]:
    """Everything measured on one machine, with its plots."""
    lines = [f"\n## {device.name}\n"]
    pictures = plots.names(device)
    for group in dict.fromkeys(measured.group for measured in device.comparisons):
        found = device.group(group)
        lines += [f"\n### {group[0].upper()}{group[1:]}\n", f"{sources(found)} where nothing else is said.\n"]
        lines += _LAYOUTS.get(group, in_full)(found)
        lines += [f"\n![{group}](plots/{name})" for name in pictures.get(group, [])]
    return lines


def in_full(found: list[Measured]) -> list[str]:
    """A table for each comparison, a row for each implementation, the failed ones too."""
    lines = []
    for measured in found:
        first, per_token = next(iter(measured.rows.values())).get("median_ms"), measured.case.unit == "token"
        rows = []
        for name, row in measured.rows.items():
            if "median_ms" not in row:
                rows.append(
                    [name, f"{row['status']}: {row['error'].splitlines()[0][:100]}".replace("|", "/"), "", "", ""]
                )
            else:
                multiple = f"{row['median_ms'] / first:.2f}" if first else ""
                rate = number(1e3 / row["median_ms"]) if per_token else _share(row)
                rows.append([name, spread(row), multiple, rate, str(row["rounds"])])
        head = ["ms", "x", "tokens a second" if per_token else "share of the limit", "rounds"]
        lines += [*table([str(measured.case), *head], rows), "", *_disturbed([measured])]
    return lines


def _share(row: Row) -> str:
    if "limit" in row:
        return f"{number(row['gflops'])} GFLOP/s" if row["limit"] == "operations" else f"{number(row['gb_per_s'])} GB/s"
    return next((f"{row[key]:.0%}" for key in ("share_of_operations", "share_of_bytes") if key in row), "")


def _disturbed(found: list[Measured]) -> list[str]:
    return [line for x in found if x.disturbed for line in (f"*disturbed: {x.case}: {x.disturbed}.*", "")]


def _beside(found: list[Measured], head: str, of: Callable[[Case], int], cell: Callable[[Row], str]) -> list[str]:
    """Comparisons beside each other: a column for each, a row for each implementation."""
    names = dict.fromkeys(name for measured in found for name in measured.rows)
    rows = [[name, *(cell(x.rows[name]) if name in x.rows else "" for x in found)] for name in names]
    return table([head, *(f"{of(measured.case):,}" for measured in found)], rows)


def _length(case: Case) -> int:
    assert case.shape is not None
    return case.shape.L


def _attn_len(case: Case) -> int:
    assert case.attn_len is not None
    return case.attn_len


def lengths(found: list[Measured]) -> list[str]:
    lines = []
    for direction in DIRECTIONS:
        chosen = [measured for measured in found if measured.case.direction == direction]
        if chosen:
            lines += [
                f"{direction}, milliseconds:\n",
                *_beside(chosen, "L = M", _length, spread),
                "",
                *_disturbed(chosen),
            ]
    return lines


def memory(found: list[Measured]) -> list[str]:
    attention = [measured for measured in found if measured.case.model is None]
    lines = ["MiB beyond the inputs:\n", *_beside(attention, "L = M", _length, _peak)] if attention else []
    for measured in found:
        if measured.case.model is not None:
            rows = [[name, _peak(row)] for name, row in measured.rows.items()]
            lines += ["", *table([str(measured.case), "MiB beyond the parameters"], rows)]
    return lines


def _peak(row: Row) -> str:
    return number(row["peak_mib"]) if "peak_mib" in row else str(row["status"])


def evaluation(found: list[Measured]) -> list[str]:
    """For each model: speed-ups at each attention length, the paper's column beside ours, then all
    times."""
    lines = []
    for network in dict.fromkeys(measured.case.network for measured in found):
        chosen = [measured for measured in found if measured.case.network == network]
        for mine in chosen[0].ours():
            lines += [f"\n**{network}; {mine['implementation']}**\n", *_speed_ups(chosen, mine["implementation"])]
        lines += [f"\n{network}, milliseconds a token:\n", *_beside(chosen, "attention length", _attn_len, spread)]
    return lines


def _speed_ups(found: list[Measured], ours: str) -> list[str]:
    others: dict[str, None] = {}
    for measured in found:
        mine = measured.rows[ours]
        others |= {n: None for n, row in measured.rows.items() if row["role"] != "ours" and comparable(row, mine)}
    rows = []
    for measured in found:
        mine, length = measured.rows[ours], _attn_len(measured.case)
        ratios = [ratio(measured.rows.get(name), mine) for name in others]
        cells = ["" if x is None else times(x) for x in ratios]
        own = number(mine["median_ms"]) if "median_ms" in mine else str(mine["status"])
        rows.append([f"{length:,}", f"{paper.SPEED_UP[length]:,}x", own, *cells])
    return table(["attention length", "paper", "ours, ms a token", *(f"speed-up over {name}" for name in others)], rows)


_LAYOUTS = {
    "evaluation speed": evaluation,
    "speed against length": lengths,
    "peak memory": memory,
    "other libraries' layers": libraries.layers,
    "peak memory of other libraries' layers": libraries.layers_memory,
    "streaming steps of other libraries' layers": libraries.steps,
    "other libraries' encoders": libraries.encoders,
}
