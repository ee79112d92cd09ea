"""The report's plots, one PNG each: speed against length, shares of the machine's limit, memory,
Table 9."""

import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness import paper
from report.records import Device, Measured, comparable, ratio

Row = dict[str, Any]


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
            axes.set_title(f"{axes.get_title()}\n{device.name}", fontsize=10)
            png = io.BytesIO()
            figure.savefig(png, metadata={"Software": None})
            found[_file(device, plot)] = png.getvalue()
    return found


def _file(device: Device, plot: Plot) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}-{plot.name}.png"


def _style(row: Row) -> dict[str, Any]:
    """Ours stands out; limits and baselines step back."""
    if row["role"] == "ours":
        return {"color": "tab:red", "lw": 2.4, "marker": "o", "zorder": 3}
    if row["role"] in ("baseline", "limit"):
        return {"color": "gray", "ls": "--", "marker": "."}
    return {"lw": 1.3, "marker": "."}


def _against_length(title: str, key: str, unit: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, found: list[Measured]) -> None:
        points: dict[str, list[tuple[int, float]]] = {}
        styles = {}
        for measured in found:
            assert measured.case.shape is not None
            for name, row in measured.rows.items():
                if key in row and row["role"] != "limit":
                    points.setdefault(name, []).append((measured.case.shape.L, row[key]))
                    styles[name] = _style(row)
        for name, line in points.items():
            axes.plot(*zip(*sorted(line), strict=True), label=name, **styles[name])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({x for line in points.values() for x, _ in line})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        axes.set(xlabel="L = M", ylabel=unit, title=title)

    return plot


def _table_9(axes: Any, found: list[Measured]) -> None:
    network = found[0].case.network
    found = [measured for measured in found if measured.case.network == network]
    longest = max(mine["segment"] for mine in found[0].ours())
    points: dict[str, list[tuple[int, float]]] = {}
    for measured in found:
        for name, row in measured.rows.items():
            mine = measured.find(role="ours", segment=row.get("segment", longest))
            speed_up = ratio(row, mine)
            if row["role"] != "ours" and mine is not None and comparable(row, mine) and speed_up is not None:
                points.setdefault(name, []).append((measured.case.attn_len or 0, speed_up))
    for name, line in points.items():
        if len(line) > 1:
            axes.plot(*zip(*line, strict=True), marker=".", label=f"over {name}")
    lengths = list(paper.SPEED_UP)
    label = "the paper, on a GPU, over its vanilla model"
    axes.plot(lengths, list(paper.SPEED_UP.values()), "k--", marker="s", ms=4, label=label)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{x:,}" for x in lengths])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    title = f"Evaluation (Table 9), {network}; ours in segments of {longest} if unsaid"
    axes.set(xlabel="attention length", ylabel="speed-up per token", title=title)


def _shares(title: str, key: str, limit: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, found: list[Measured]) -> None:
        bars = [(x, row) for x in found for row in x.rows.values() if key in row]
        colors = [_style(row).get("color", "tab:blue") for _, row in bars]
        labels = [f"{row['implementation']}\n{x.case.shape}" for x, row in bars]
        axes.barh(range(len(bars)), [100 * row[key] for _, row in bars], color=colors)
        axes.set_yticks(range(len(bars)), labels, fontsize=6)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
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
