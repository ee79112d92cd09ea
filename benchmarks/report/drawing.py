"""How figures are drawn: ours in one colour, lines named where they end, bars with their values."""

import math
from typing import Any

from report.records import Measured

OURS, STEPS_BACK, OTHERS = "tab:red", "gray", ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
Lines = dict[str, list[tuple[float, float]]]


def style(role: str, n: int) -> dict[str, Any]:
    """Of the n-th line: ours stands out; limits and baselines step back."""
    if role == "ours":
        return {"color": OURS, "lw": 2.4, "marker": "o", "zorder": 3}
    if role in ("baseline", "limit"):
        return {"color": STEPS_BACK, "ls": "--", "marker": ".", "zorder": 4}
    return {"color": OTHERS[n % len(OTHERS)], "lw": 1.3, "marker": "."}


def label_ends(axes: Any, lines: Lines, colors: dict[str, str], apart: float = 0.062) -> None:
    """Names beside the last points of lines on a logarithmic axis, moved until none covers another.

    apart: of the axis' height, at least between two.
    """
    low, high = axes.get_ylim()
    ends = sorted((line[-1][1], name) for name, line in lines.items())
    places = [_share(y, low, high) for y, _ in ends]
    for _ in range(200):  # two that are too close give way to each other
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


def _share(y: float, low: float, high: float) -> float:
    """How far up a logarithmic axis."""
    return math.log(y / low) / math.log(high / low)


def bars(axes: Any, found: list[Measured], key: str) -> None:
    """A group of bars for each shape, per cent of a limit, each with its value."""
    y, ticks, labels = 0.0, [], []
    for measured in found:
        rows = [row for row in measured.rows.values() if key in row]
        if not rows:
            continue
        axes.text(0, y, str(measured.case.shape), fontsize=8, va="center", weight="bold")
        y += 0.9
        for row in rows:
            value = 100 * row[key]
            color = {"ours": OURS, "baseline": STEPS_BACK, "limit": STEPS_BACK}.get(row["role"], OTHERS[0])
            axes.barh(y, value, color=color, height=0.8)
            axes.text(value + 0.8, y, f"{value:.0f}%", fontsize=8, va="center")
            ticks.append(y)
            labels.append(row["implementation"])
            y += 1
        y += 0.4
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.6, -0.8)  # from the top down
    axes.grid(alpha=0.3, axis="x")
