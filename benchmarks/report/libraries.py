"""Other libraries' layers and encoders, as they are and accelerated: a row each, of the report and
of docs/how-to/accelerate.md."""

from collections.abc import Callable
from typing import Any

from harness.case import DIRECTIONS, Case
from report.formats import number, sources, table, times
from report.records import Device, Measured, ratio

Row = dict[str, Any]
Cell = Callable[[Row, Row], str]


def lines(devices: list[Device]) -> list[str]:
    """For the documentation, of each machine that has been measured."""
    shown = []
    for device in devices:
        groups = {name: found for name in _TITLES if (found := [x for x in device.group(name) if _measured(x)])}
        if not groups:
            continue
        measured = [x for found in groups.values() for x in found]
        shown += [f"{device.name} ({sources(measured)}):", ""]
        for name, found in groups.items():
            shown += ["\n".join(_TITLES[name](found)).strip("\n"), ""]
    return shown[:-1]


def _measured(comparison: Measured) -> bool:
    """Whether the library was there."""
    return any(row["status"] == "measured" for row in comparison.rows.values())


def layers(found: list[Measured]) -> list[str]:
    """Each layer at each length: its time and the accelerated one's."""
    lines = []
    for direction in DIRECTIONS:
        chosen = [measured for measured in found if measured.case.direction == direction]
        lines += [f"\n{direction}, milliseconds, as it is / accelerated (times as fast):\n", *_two_ways(chosen, _times)]
    return lines


def layers_memory(found: list[Measured]) -> list[str]:
    return [
        "forward+backward, peak memory in MiB beyond the inputs, as it is / accelerated (a part of it):\n",
        *_two_ways(found, _peaks),
    ]


def _two_ways(found: list[Measured], cell: Cell) -> list[str]:
    """A row for each model, a column for each length."""
    lengths = sorted({measured.case.shape.L for measured in found if measured.case.shape is not None})
    by_model: dict[str, dict[int, str]] = {}
    for measured in found:
        pair = _pair(measured)
        if pair is not None and measured.case.shape is not None:
            by_model.setdefault(str(measured.case.model), {})[measured.case.shape.L] = cell(*pair)
    rows = [[model, *(cells.get(n, "") for n in lengths)] for model, cells in by_model.items()]
    return table(["layer", *(f"{n:,} frames" for n in lengths)], rows)


def _pair(measured: Measured) -> tuple[Row, Row] | None:
    """As it is, and accelerated."""
    theirs, ours = (measured.find(algorithm=name) for name in ("original", "accelerated"))
    return None if theirs is None or ours is None else (theirs, ours)


def _times(theirs: Row, ours: Row) -> str:
    found = ratio(theirs, ours)
    if found is None:
        return f"{theirs['status']} / {ours['status']}"
    return f"{number(theirs['median_ms'])} / {number(ours['median_ms'])} ({times(found)})"


def _peaks(theirs: Row, ours: Row) -> str:
    if "peak_mib" not in theirs or "peak_mib" not in ours:
        return f"{theirs['status']} / {ours['status']}"
    share = theirs["peak_mib"] / max(ours["peak_mib"], 1.0)
    return f"{number(theirs['peak_mib'])} / {number(ours['peak_mib'])} (1/{share:.1f})"


def steps(found: list[Measured]) -> list[str]:
    """NeMo's streaming steps."""
    return ["a streaming step, milliseconds:\n", *_rows(found, lambda c: f"{c.model}, {_sizes(c)}", "layer")]


def encoders(found: list[Measured]) -> list[str]:
    """Whole encoders of random weights."""
    return ["whole encoders, forward, milliseconds:\n", *_rows(found, lambda c: f"{c.network}, {c.note}", "encoder")]


def _sizes(case: Case) -> str:
    assert case.shape is not None
    new = case.shape.L
    return f"{new} new frame{'s' if new > 1 else ''}, {case.shape.M} cached"


def _rows(found: list[Measured], title: Callable[[Case], str], head: str) -> list[str]:
    rows = [[title(x.case), _times(*pair)] for x in found if (pair := _pair(x)) is not None]
    return table([head, "as it is / accelerated"], rows)


_TITLES = {
    "other libraries' layers": layers,
    "peak memory of other libraries' layers": layers_memory,
    "streaming steps of other libraries' layers": steps,
    "other libraries' encoders": encoders,
}
