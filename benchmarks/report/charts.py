"""The report's plots: speed against length, shares of the machine's limit, memory, and Table 9."""

import io
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.case import SPEED_UP
from report.records import Device, Measured
from txl.pictures import new_figure

LENGTH = "speed against length"
OURS, STEPS_BACK, OTHERS = "tab:red", "gray", ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
Lines = dict[str, list[tuple[float, float]]]


class Plot(NamedTuple):
    """A plot of a group of comparisons, or of one of its directions. It calls draw(axes, found,
    key, *words) with the comparisons whose rows have `key`."""

    group: str
    direction: str | None
    name: str
    draw: Callable[..., None]
    key: str
    words: tuple[str, ...] = ()

    def of(self, device: Device) -> list[Measured]:
        """Return the comparisons to draw."""
        found = device.group(self.group, self.direction)
        return [measured for measured in found if any(self.key in row for row in measured.rows.values())]

    def file(self, device: Device) -> str:
        return f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}-{self.name}.png"


def names(device: Device) -> dict[str, list[str]]:
    """Return file names by group, for the plots that this device has figures for."""
    found: dict[str, list[str]] = {}
    for plot in _PLOTS:
        if plot.of(device):
            found.setdefault(plot.group, []).append(plot.file(device))
    return found


def draw(device: Device) -> dict[str, bytes]:
    """Return the contents of these files. The same figures and matplotlib version give the same
    bytes on a processor with the same vector instructions."""
    found = {}
    for plot in _PLOTS:
        measured = plot.of(device)
        if measured:
            figure = new_figure(8, 4.6)
            axes = figure.add_subplot()
            plot.draw(axes, measured, plot.key, *plot.words)
            figure.suptitle(f"{axes.get_title()}\n{device.name}", fontsize=10)  # two lines, because both names are long
            axes.set_title("")
            png = io.BytesIO()
            figure.savefig(png, dpi=110, metadata={"Software": None})
            found[plot.file(device)] = png.getvalue()
    return found


def _against_length(axes: Any, found: list[Measured], key: str, title: str, unit: str) -> None:
    points: Lines = {}
    styles: dict[str, dict[str, Any]] = {}
    for measured in sorted(found, key=lambda measured: measured.case.shape.L):
        for name, row in measured.rows.items():
            if key in row and row["role"] != "limit":
                points.setdefault(name, []).append((measured.case.shape.L, row[key]))
                styles.setdefault(name, _style(row["role"], len(styles)))
    _draw_lines(axes, points, styles)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for line in points.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.set(xlabel="L = M", ylabel=unit, title=title)


def _style(role: str, n: int) -> dict[str, Any]:
    """Return the style of the n-th line: this package's are prominent, baselines are not."""
    if role == "ours":
        return {"color": OURS, "lw": 2.4, "marker": "o", "zorder": 3}
    if role == "baseline":
        return {"color": STEPS_BACK, "ls": "--", "marker": ".", "zorder": 4}
    return {"color": OTHERS[n % len(OTHERS)], "lw": 1.3, "marker": "."}


def _table_9(axes: Any, found: list[Measured], key: str) -> None:
    network, longest = found[0].case.network, max(mine["segment"] for mine in found[0].ours())
    found = [measured for measured in found if measured.case.network == network]
    points: Lines = {}
    for measured in sorted(found, key=lambda measured: measured.case.attn_len):
        for name, row in measured.rows.items():
            if row["role"] not in ("ours", "limit") and (speed_ups := measured.speed_ups(row)):
                points.setdefault(f"over {name}", []).append((measured.case.attn_len, speed_ups[-1]))
    points = {name: line for name, line in points.items() if len(line) > 1}
    styles: dict[str, dict[str, Any]] = {name: {"color": OURS, "marker": "o", "ms": 4} for name in points}
    paper_s = "the paper, on a GPU,\nover its vanilla model"
    points[paper_s] = [(float(length), float(factor)) for length, factor in SPEED_UP.items()]
    styles[paper_s] = {"color": "black", "ls": "--", "marker": "s", "ms": 4}
    _draw_lines(axes, points, styles)
    axes.set_xticks(list(SPEED_UP), [f"{x:,}" for x in SPEED_UP])
    title = f"Evaluation (Table 9), {network}; ours in segments of {longest} if unsaid"
    axes.set(xlabel="attention length", ylabel="speed-up per token", title=title)


def _shares(axes: Any, found: list[Measured], key: str, title: str, limit: str) -> None:
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for measured in found:
        for name, row in measured.rows.items():
            if key in row:
                color = {"ours": OURS, "baseline": STEPS_BACK}.get(row["role"], OTHERS[0])
                groups.setdefault(str(measured.case.shape), []).append((name, 100 * row[key], color))
    _draw_bars(axes, groups)
    axes.set(xlabel=f"% of {limit}, measured in the same comparison", title=title, xlim=(0, 100))


def _draw_lines(axes: Any, lines: Lines, styles: dict[str, dict[str, Any]]) -> None:
    """Draw lines on a logarithmic axis with names at their ends; styles: of each line, with its
    color."""
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), **styles[name])
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    _label_ends(axes, lines, {name: styles[name]["color"] for name in lines})


def _label_ends(axes: Any, lines: Lines, colors: dict[str, str], apart: float = 0.062) -> None:
    """Write names beside the last points of lines on a logarithmic axis, moved so that none
    overlap.

    apart: minimum distance between two names, as a fraction of the axis' height.
    """
    low, high = axes.get_ylim()
    ends = sorted((line[-1][1], name) for name, line in lines.items())
    places = [math.log(y / low) / math.log(high / low) for y, _ in ends]
    for _ in range(200):  # moves two names that are too close in opposite directions
        for n in range(len(places) - 1):
            missing = max(apart - (places[n + 1] - places[n]), 0) / 2
            places[n], places[n + 1] = places[n] - missing, places[n + 1] + missing
    for (y, name), place in zip(ends, places, strict=True):
        text = axes.annotate(
            name, xy=(lines[name][-1][0], y), xytext=(1.03, place), textcoords="axes fraction", va="center", fontsize=8,
            color=colors[name], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colors[name], "lw": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        text.set_in_layout(True)


def _draw_bars(axes: Any, groups: dict[str, list[tuple[str, float, str]]]) -> None:
    """Draw a group of bars for each title; each bar has a name, a percentage and a color, and shows
    its value."""
    y, ticks, labels = 0.0, [], []
    for title, found in groups.items():
        axes.text(0, y, title, fontsize=8, va="center", weight="bold")
        y += 0.9
        for name, value, color in found:
            axes.barh(y, value, color=color, height=0.8)
            axes.text(value + 0.8, y, f"{value:.0f}%", fontsize=8, va="center")
            ticks.append(y)
            labels.append(name)
            y += 1
        y += 0.4
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.6, -0.8)  # top to bottom
    axes.grid(alpha=0.3, axis="x")


_BOTH, _OPERATIONS, _PEAK, _MS = "forward+backward", "share_of_operations", "the machine's peak", "milliseconds"
_MEMORY = ("Peak memory, forward and backward", "MiB beyond the inputs")
_DECODE = ("One query: bytes that must be read", "a plain read")
_PLOTS = (
    Plot("attention", "forward", "share-forward", _shares, _OPERATIONS, ("Useful operations, forward", _PEAK)),
    Plot(
        "attention", _BOTH, "share-backward", _shares, _OPERATIONS, ("Useful operations, forward and backward", _PEAK)
    ),
    Plot("decode", None, "share-decode", _shares, "share_of_bytes", _DECODE),
    Plot(LENGTH, "forward", "length-forward", _against_length, "median_ms", ("Forward", _MS)),
    Plot(LENGTH, _BOTH, "length-backward", _against_length, "median_ms", ("Forward and backward", _MS)),
    Plot("peak memory", _BOTH, "memory", _against_length, "peak_mib", _MEMORY),
    Plot("evaluation speed", None, "table-9", _table_9, "median_ms"),
)
