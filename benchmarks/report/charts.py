"""The plots of docs/speed.md: speed against length, Table 9, decode, and memory."""

import io
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.case import SPEED_UP, Row
from report.records import Device, Measured
from txl.pictures import BLACK, BLUE, GRAY, OTHERS, RED, new_figure

LENGTH = "speed against length"
# Of other implementations, in order of appearance; lines differ in marker and color.
MARKERS = "sD^vP*X<>"
GRAPH = ", CUDA graph"  # end of the names of implementations that also ran without one
Lines = dict[str, list[tuple[float, float]]]
Style = dict[str, Any]


class Plot(NamedTuple):
    """A plot of a group of comparisons, or of one of its directions. It calls draw(a device's
    comparisons whose rows have `key`, key, *words) and gets a figure."""

    group: str
    direction: str | None
    draw: Callable[..., Any]
    key: str
    words: tuple[str, ...] = ()

    def of(self, device: Device) -> list[Measured]:
        """Return the comparisons to draw."""
        found = device.group(self.group, self.direction)
        return [measured for measured in found if any(self.key in row for row in measured.rows.values())]


def _drawn(devices: list[Device]) -> dict[str, Device]:
    """Return the first device with figures for each plot that any has figures for."""
    found = {name: next((x for x in devices if plot.of(x)), None) for name, plot in _PLOTS.items()}
    return {name: device for name, device in found.items() if device is not None}


def _file(name: str, device: Device) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}-{name}.png"


def files(devices: list[Device]) -> dict[str, str]:
    """Return file names by the names of plots, of the first device with figures for a plot."""
    return {name: _file(name, device) for name, device in _drawn(devices).items()}


def draw(devices: list[Device]) -> dict[str, bytes]:
    """Return the contents of these files. The same figures and matplotlib version give the same
    bytes on a processor with the same vector instructions."""
    found = {}
    for name, device in _drawn(devices).items():
        plot = _PLOTS[name]
        figure = plot.draw(plot.of(device), plot.key, *plot.words)
        (axes,) = figure.axes
        figure.suptitle(f"{axes.get_title()}\n{device.name}", fontsize=10)  # two lines, because both names are long
        axes.set_title("")
        png = io.BytesIO()
        figure.savefig(png, dpi=110, metadata={"Software": None})
        found[_file(name, device)] = png.getvalue()
    return found


def _dtype(found: list[Measured]) -> str:
    return ", ".join(dict.fromkeys(str(measured.about["dtype"]) for measured in found))


def _styles(rows: dict[str, Row]) -> dict[str, Style]:
    """Return the style of each implementation's line or markers: this package's are prominent, and
    what ran in a CUDA graph has the color of the same without one, filled."""
    styles: dict[str, Style] = {}
    graphs = any(name.endswith(GRAPH) for name in rows)
    kinds = {
        "ours": iter([(RED, "o"), (OTHERS[4], "p"), (OTHERS[3], "h")]),
        "baseline": iter([(GRAY, "X"), (BLACK, "X")]),
    }
    others = iter(zip(OTHERS * 3, MARKERS * 3, strict=False))
    for name, row in rows.items():
        twin = styles.get(name.removesuffix(GRAPH)) if name.endswith(GRAPH) else None
        color, marker = (twin["color"], twin["marker"]) if twin else next(kinds.get(row["role"], others))
        filled = name.endswith(GRAPH) or not graphs
        styles[name] = {"color": color, "marker": marker, "mfc": color if filled else "none", "ms": 6}
        styles[name] |= {"lw": 2.4, "zorder": 3} if row["role"] == "ours" else {"lw": 1.3}
        styles[name] |= {"ls": "--", "zorder": 4} if row["role"] == "baseline" else {}
    return styles


def _rows(found: list[Measured], key: str) -> dict[str, Row]:
    """Return a row of each implementation that was measured anywhere, but of no limit."""
    rows: dict[str, Row] = {}
    for measured in found:
        for name, row in measured.rows.items():
            if key in row and row["role"] != "limit":
                rows.setdefault(name, row)
    return rows


def _against_length(found: list[Measured], key: str, title: str, unit: str) -> Any:
    found = sorted(found, key=lambda measured: measured.case.shape.L)
    styles = _styles(_rows(found, key))
    points = {
        name: [
            (measured.case.shape.L, measured.rows[name][key])
            for measured in found
            if key in measured.rows.get(name, {})
        ]
        for name in styles
    }
    figure, axes = _figure(8.6, 1.6 + 0.32 * max(len(points), 8))
    _draw_lines(axes, points, styles)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for line in points.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    shape = found[0].case.shape
    title = f"{title}, B{shape.B} H{shape.H} D{shape.D}, {_dtype(found)}"
    axes.set(xlabel="L = M, queries and keys of the memory", ylabel=unit, title=title)
    return figure


def _table_9(found: list[Measured], key: str) -> Any:
    """Draw the speed-up over the vanilla model as published, over the fastest one, and over other
    implementations with memory, beside the paper's."""
    network, longest = found[0].case.network, max(mine["segment"] for mine in found[0].ours())
    found = [measured for measured in found if measured.case.network == network]
    points: Lines = {}
    for measured in sorted(found, key=lambda measured: measured.case.attn_len):
        chosen = {
            "over vanilla, as published": measured.find(implementation=PUBLISHED),
            "over the fastest vanilla": fastest(measured),
        }
        for name, row in measured.rows.items():
            if row["role"] == "other" and not name.startswith("vanilla"):
                chosen[f"over {name}"] = row
        for name, row in chosen.items():
            if speed_ups := measured.speed_ups(row):
                points.setdefault(name, []).append((measured.case.attn_len, speed_ups[-1]))
    points = {name: line for name, line in points.items() if len(line) > 1}
    looks = ((BLUE, "s"), (RED, "o"), *zip(OTHERS[1:], MARKERS[1:], strict=False))
    styles = {
        name: {"color": color, "marker": marker, "ms": 6} for name, (color, marker) in zip(points, looks, strict=False)
    }
    paper_s = "the paper, on a GPU,\nover its vanilla model"
    points[paper_s] = [(float(length), float(factor)) for length, factor in SPEED_UP.items()]
    styles[paper_s] = {"color": BLACK, "ls": "--", "marker": "X", "ms": 6}
    figure, axes = _figure(8.6, 4.2)
    _draw_lines(axes, points, styles)
    axes.set_xticks(list(SPEED_UP), [f"{x:,}" for x in SPEED_UP])
    title = f"Speed-up of cached evaluation (Table 9), {network}, {_dtype(found)}; ours in segments of {longest}"
    axes.set(xlabel="attention length: keys that each token sees", ylabel="speed-up per token", title=title)
    return figure


PUBLISHED = "vanilla, eager as published"


def fastest(measured: Measured) -> Row | None:
    """Return the row of the fastest vanilla model of an evaluation, which reads its window anew for
    each token; None if none was measured."""
    vanilla = [row for name, row in measured.rows.items() if name.startswith("vanilla") and "median_ms" in row]
    return min(vanilla, key=lambda row: float(row["median_ms"]), default=None)


def _shares(found: list[Measured], key: str, title: str, limit: str) -> Any:
    """Draw a row of markers for each shape, one for each implementation."""
    rows = {name: row for name, row in _rows(found, key).items() if "limit" not in row}
    styles = _styles(rows)
    lines = math.ceil(len(styles) / 2)  # of the legend, in two columns
    figure, axes = _figure(8.6, 1.5 + 0.34 * len(found) + 0.21 * lines)
    for name, style in styles.items():
        at = [(100 * x.rows[name][key], y) for y, x in enumerate(found) if key in x.rows.get(name, {})]
        axes.plot(*zip(*at, strict=True), label=name, **style | {"ls": "none"})
    for y, measured in enumerate(found):
        best = max((100 * row[key] for row in measured.ours() if key in row), default=None)
        if best is not None:
            axes.annotate(
                f"{best:.0f}%", (best, y), xytext=(0, 5), textcoords="offset points", fontsize=8, ha="center", color=RED
            )
    axes.set_yticks(range(len(found)), [str(measured.case.shape) for measured in found], fontsize=9)
    axes.set_ylim(len(found) - 0.4, -0.7)  # top to bottom
    axes.grid(alpha=0.3)
    axes.set(xlabel=f"% of {limit}, measured in the same comparison", title=f"{title}, {_dtype(found)}", xlim=(0, 100))
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = new_figure(width, height)
    return figure, figure.add_subplot()


def _draw_lines(axes: Any, lines: Lines, styles: dict[str, Style]) -> None:
    """Draw lines on a logarithmic axis with names at their ends; styles: of each line, with its
    color."""
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), **styles[name])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.3)
    _label_ends(axes, lines, {name: styles[name]["color"] for name in lines})


def _label_ends(axes: Any, lines: Lines, colors: dict[str, str]) -> None:
    """Write names beside the last points of lines on a logarithmic axis, moved so that none
    overlap."""
    low, high = axes.get_ylim()
    apart = 0.24 / axes.figure.get_figheight() * 1.25  # of two names, as a fraction of the axis' height
    ends = sorted((line[-1][1], name) for name, line in lines.items())
    places = [math.log(y / low) / math.log(high / low) for y, _ in ends]
    for _ in range(200):  # moves two names that are too close in opposite directions
        for n in range(len(places) - 1):
            missing = max(apart * (1 + ends[n][1].count("\n")) - (places[n + 1] - places[n]), 0) / 2
            places[n], places[n + 1] = places[n] - missing, places[n + 1] + missing
    for (y, name), place in zip(ends, places, strict=True):
        text = axes.annotate(
            name, xy=(lines[name][-1][0], y), xytext=(1.03, place), textcoords="axes fraction", va="center", fontsize=9,
            color=colors[name], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colors[name], "lw": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        text.set_in_layout(True)


_PLOTS = {
    "length-forward": Plot(LENGTH, "forward", _against_length, "median_ms", ("Attention, forward", "milliseconds")),
    "table-9": Plot("evaluation speed", None, _table_9, "median_ms"),
    "share-decode": Plot(
        "decode", None, _shares, "share_of_bytes", ("Decode: bytes that must be read", "the bandwidth of a plain read")
    ),
    "memory": Plot(
        "peak memory", "forward+backward", _against_length, "peak_mib",
        ("Peak memory, forward + backward", "MiB beyond the inputs"),
    ),
}  # fmt: skip
