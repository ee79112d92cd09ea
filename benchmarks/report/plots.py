"""The report's plots, one PNG each: speed against length, shares of the machine's limit, memory,
Table 9."""

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness import paper
from report import drawing
from report.records import Device, Measured, comparable, ratio


class Plot(NamedTuple):
    """What is drawn of a group (of one of its directions), into which file."""

    group: str
    direction: str | None
    name: str
    draw: Callable[[Any, list[Measured]], None]
    wanted: Callable[[Measured], bool] = lambda measured: True

    def of(self, device: Device) -> list[Measured]:
        """What there is to draw."""
        return [measured for measured in device.group(self.group, self.direction) if self.wanted(measured)]


def names(device: Device) -> dict[str, list[str]]:
    """Files by the group they belong to, of the plots this device has figures for."""
    found: dict[str, list[str]] = {}
    for plot in _PLOTS:
        if plot.of(device):
            found.setdefault(plot.group, []).append(_file(device, plot))
    return found


def draw(device: Device) -> dict[str, bytes]:
    """The same files' contents: the same bytes from the same figures and the same matplotlib."""
    found = {}
    for plot in _PLOTS:
        measured = plot.of(device)
        if measured:
            figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=110)
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            plot.draw(axes, measured)
            figure.suptitle(f"{axes.get_title()}\n{device.name}", fontsize=10)  # as wide as names and all
            axes.set_title("")
            png = io.BytesIO()
            figure.savefig(png, metadata={"Software": None})
            found[_file(device, plot)] = png.getvalue()
    return found


def _file(device: Device, plot: Plot) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}-{plot.name}.png"


def _against_length(title: str, key: str, unit: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, found: list[Measured]) -> None:
        points: drawing.Lines = {}
        roles: dict[str, str] = {}
        for measured in found:
            assert measured.case.shape is not None
            for name, row in measured.rows.items():
                if key in row and row["role"] != "limit":
                    points.setdefault(name, []).append((measured.case.shape.L, row[key]))
                    roles[name] = row["role"]
        _lines(axes, points, {name: drawing.style(roles[name], n) for n, name in enumerate(points)})
        axes.set_xscale("log", base=2)
        ticks = sorted({x for line in points.values() for x, _ in line})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.set(xlabel="L = M", ylabel=unit, title=title)

    return plot


def _lines(axes: Any, points: drawing.Lines, styles: dict[str, dict[str, Any]]) -> None:
    """Lines on a logarithmic axis, named at their ends."""
    for name in points:
        points[name].sort()
        axes.plot(*zip(*points[name], strict=True), **styles[name])
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    drawing.label_ends(axes, points, {name: styles[name]["color"] for name in points})


def _table_9(axes: Any, found: list[Measured]) -> None:
    network = found[0].case.network
    found = [measured for measured in found if measured.case.network == network]
    longest = max(mine["segment"] for mine in found[0].ours())
    points: drawing.Lines = {}
    for measured in found:
        for name, row in measured.rows.items():
            mine = measured.find(role="ours", segment=row.get("segment", longest))
            speed_up = ratio(row, mine)
            if row["role"] != "ours" and mine is not None and comparable(row, mine) and speed_up is not None:
                points.setdefault(f"over {name}", []).append((measured.case.attn_len or 0, speed_up))
    points = {name: line for name, line in points.items() if len(line) > 1}
    styles = {name: {"color": drawing.OURS, "marker": "o", "ms": 4} for name in points}  # all are ours
    paper_s = "the paper, on a GPU,\nover its vanilla model"
    points[paper_s] = [(float(length), float(factor)) for length, factor in paper.SPEED_UP.items()]
    styles[paper_s] = {"color": "black", "ls": "--", "marker": "s", "ms": 4}
    _lines(axes, points, styles)
    axes.set_xticks(list(paper.SPEED_UP), [f"{x:,}" for x in paper.SPEED_UP])
    title = f"Evaluation (Table 9), {network}; ours in segments of {longest} if unsaid"
    axes.set(xlabel="attention length", ylabel="speed-up per token", title=title)


def _shares(title: str, key: str, limit: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, found: list[Measured]) -> None:
        drawing.bars(axes, found, key)
        axes.set(xlabel=f"% of {limit}, measured in the same comparison", title=title, xlim=(0, 100))

    return plot


def _undisturbed(measured: Measured) -> bool:
    return not measured.disturbed


def _of_attention(measured: Measured) -> bool:
    return measured.case.model is None


def _share_plot(group: str, direction: str | None, name: str, title: str) -> Plot:
    key, limit = ("bytes", "a plain read") if group == "decode" else ("operations", "the machine's peak")
    return Plot(group, direction, name, _shares(title, f"share_of_{key}", limit), _undisturbed)


def _length_plot(direction: str, name: str, title: str) -> Plot:
    return Plot("speed against length", direction, name, _against_length(title, "median_ms", "milliseconds"))


_MEMORY = _against_length("Peak memory, forward and backward", "peak_mib", "MiB beyond the inputs")
_PLOTS = (
    _share_plot("attention", "forward", "share-forward", "Useful operations, forward"),
    _share_plot("attention", "forward+backward", "share-backward", "Useful operations, forward and backward"),
    _share_plot("decode", None, "share-decode", "One query: bytes that must be read"),
    _length_plot("forward", "length-forward", "Forward"),
    _length_plot("forward+backward", "length-backward", "Forward and backward"),
    Plot("peak memory", None, "memory", _MEMORY, _of_attention),
    Plot("evaluation speed", None, "table-9", _table_9),
)
