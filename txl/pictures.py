"""matplotlib, imported only where something is drawn: that takes a third of a second."""

import io
from pathlib import Path
from typing import Any

from txl.paths import AnyPath, replace_bytes


def missing() -> str | None:
    """Why nothing can be drawn, in words; None if it can."""
    try:
        new_figure()
    except ImportError as error:
        return f'matplotlib cannot be used ({error}): pip install "txl-kernels[plots]"'
    return None


def save(figure: Any, path: AnyPath) -> None:
    """Writes a figure as PNG, or leaves the file that is there as it was.

    Raises:
        OSError: it cannot be written.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png")
    replace_bytes(Path(path), content.getvalue())


def label(name: str) -> str:
    """A name as matplotlib shows it: no mathematics in it, and in the legend whatever its first
    letter."""
    shown = name.encode("utf-8", "replace").decode("utf-8").replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """An empty figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure
