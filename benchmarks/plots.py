"""The report's plots, one PNG each: speed against length, shares of the machine's limit, memory, Table 9."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from records import PAPER, Device, Measured, attention_length


def names(device: Device) -> dict[str, list[str]]:
    """Files by the group they belong to, of the plots this device has figures for."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    found = {}
    for group, (name, _) in _PLOTS.items():
        if device.group(group):
            found[group] = [f"{slug}-{name}.png"]
    return found


def draw(device: Device, folder: Path) -> dict[str, list[str]]:
    """Writes them into `folder`; returns `names`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = names(device)
    for group, files in found.items():
        figure = Figure(figsize=(8, 4.6), layout="constrained", dpi=110)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _PLOTS[group][1](axes, device.group(group))
        axes.set_title(f"{axes.get_title()}\n{device.name}", fontsize=10)
        for name in files:
            figure.savefig(folder / name, metadata={"Software": None})
    return found


def _style(name: str) -> dict[str, Any]:
    """Ours stands out; limits and yardsticks step back."""
    if name.startswith(("rel_attention", "ours")):
        return {"color": "tab:red", "lw": 2.4, "marker": "o", "zorder": 3}
    if name.startswith(("yardstick", "limit")):
        return {"color": "gray", "ls": "--", "marker": "."}
    return {"lw": 1.3, "marker": "."}


def _curves(axes: Any, races: list[Measured], at: Callable[[str], int], value: Callable[[dict[str, Any]], Any]) -> None:
    for name in dict.fromkeys(name for race in races for name in race.rows):
        points = [(at(race.case), value(race.rows[name])) for race in races if name in race.rows]
        points = sorted((x, y) for x, y in points if y is not None)
        if points and not name.startswith("limit"):
            axes.plot(*zip(*points, strict=True), label=name, **_style(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({at(race.case) for race in races})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def _length(title: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, races: list[Measured]) -> None:
        _curves(axes, races, lambda case: int(re.findall(r"L(\d+)", case)[0]), lambda row: row.get("median_ms"))
        axes.set(xlabel="L = M", ylabel="milliseconds", title=title)

    return plot


def _memory(axes: Any, races: list[Measured]) -> None:
    races = [race for race in races if race.case.startswith("attention")]
    _curves(axes, races, lambda case: int(case.rsplit(" ", 1)[1]), lambda row: row.get("peak_mib"))
    axes.set(xlabel="L = M", ylabel="MiB beyond the inputs", title="Peak memory, forward and backward")


def _table_9(axes: Any, races: list[Measured]) -> None:
    model = races[0].case.split(", attention")[0]
    races = [race for race in races if race.case.startswith(model)]

    for name in dict.fromkeys(name for race in races for name in race.rows):
        segments = name.split("segments of ")[1] if "segments of" in name else "512"
        mine = f"ours, cached keys and values, segments of {segments}"
        points = [(attention_length(race.case), race.ratio(name, mine)) for race in races]
        points = [(x, y) for x, y in points if y is not None]
        if not name.startswith("ours") and len(points) > 1:
            axes.plot(*zip(*points, strict=True), marker=".", label=f"over {name}")
    axes.plot(
        list(PAPER), list(PAPER.values()), "k--", marker="s", ms=4, label="the paper, on a GPU, over its vanilla model"
    )
    axes.set_yscale("log")
    axes.set_xticks(list(PAPER), [f"{x:,}" for x in PAPER])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    axes.set(
        xlabel="attention length",
        ylabel="speed-up per token",
        title=f"Evaluation (Table 9), {model}; ours in segments of 512 if unsaid",
    )


def _shares(title: str, key: str, limit: str) -> Callable[[Any, list[Measured]], None]:
    def plot(axes: Any, races: list[Measured]) -> None:
        bars = [
            (f"{name}\n{race.case}" if len(races) > 1 else name, row[key], name)
            for race in races
            for name, row in race.rows.items()
            if key in row
        ]
        colors = [_style(name).get("color", "tab:blue") for _, _, name in bars]
        axes.barh(range(len(bars)), [100 * share for _, share, _ in bars], color=colors)
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=6)
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set(xlabel=f"% of {limit}, measured in the same race", title=title, xlim=(0, 100))

    return plot


_PLOTS: dict[str, tuple[str, Callable[[Any, list[Measured]], None]]] = {
    "forward": ("share-forward", _shares("Useful operations, forward", "share_of_operations", "the machine's peak")),
    "forward+backward": (
        "share-backward",
        _shares("Useful operations, forward and backward", "share_of_operations", "the machine's peak"),
    ),
    "decode": ("share-decode", _shares("One query: bytes that must be read", "share_of_bytes", "a plain read")),
    "speed against length, forward": ("length-forward", _length("Forward")),
    "speed against length, forward+backward": ("length-backward", _length("Forward and backward")),
    "peak memory": ("memory", _memory),
    "evaluation speed": ("table-9", _table_9),
}
