"""The chart of a run's loss, and helpers for other charts.

matplotlib is imported only when something is drawn, because that takes a third of a second.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl.paths import AnyPath, replace_bytes

_UNITS = {"bpc": "bits per character", "ppl": "perplexity"}
_MAX_VALUE = 1e100  # the largest value that matplotlib can draw
# Colors of Okabe and Ito, which differ without red and green, too.
RED, BLUE, GRAY, BLACK = "#D55E00", "#0072B2", "#777777", "#000000"
OTHERS = (BLUE, "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def missing() -> str | None:
    """Return why no chart can be drawn (a message for the user), or None if one can."""
    try:
        new_figure()
    except ImportError as error:
        return f'matplotlib cannot be used ({error}): pip install "txl-kernels[plots]"'
    return None


def save(figure: Any, path: AnyPath) -> None:
    """Write a figure as PNG; on an error the existing file is kept.

    Raises:
        OSError: it cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png")
    replace_bytes(Path(path), content.getvalue())


def label(name: str) -> str:
    """Return a name escaped for matplotlib: not parsed as mathematics, and shown in the legend even
    if it begins with an underscore."""
    shown = name.encode("utf-8", "replace").decode("utf-8").replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """Make an empty figure; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure


def whole_ticks(*axes: Any) -> None:
    """Put the ticks of axes of numbers at whole ones only."""
    for axis in axes:
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def draw_loss(entries: Sequence[Mapping[str, Any]], path: AnyPath, unit: str) -> None:
    """Draw the training and validation loss over the updates.

    Args:
        entries: a run's log, as `read_log` gives it; values that cannot be drawn are left out.
        path: the PNG file.
        unit: "bpc" (bits per character) or "ppl" (perplexity), as the log names the losses.
    """

    def points(name: str) -> list[tuple[int, float]]:
        return [(e["step"], e[name]) for e in entries if isinstance(e.get(name), float) and abs(e[name]) < _MAX_VALUE]

    train, valid = points(unit), points(f"valid_{unit}")
    figure = new_figure()
    axes = figure.add_subplot()
    for values, style, name in ((train, "-", "training"), (valid, "o-", "validation")):
        axes.plot([x for x, _ in values], [y for _, y in values], style, label=name)
    if len(train) > 4:  # the high losses of the first steps would flatten the rest of the curve
        heights = [y for _, y in train[len(train) // 20 :] + valid]
        margin = 0.05 * (max(heights) - min(heights)) or 0.1
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.set(xlabel="update", ylabel=_UNITS[unit], title="Loss")
    whole_ticks(axes.xaxis)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def draw_lengths(scores: Sequence[tuple[int, float]], path: AnyPath) -> None:
    """Draw bits per character against the attention length.

    scores: (attention length, bits per character). path: the PNG file.
    """
    lengths, bpc = zip(*scores, strict=True)
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot(lengths, bpc, "o-", color="C0")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="attention length", ylabel="bits per character", title="Cached memory, on the test split")
    axes.grid(alpha=0.3)
    save(figure, path)
