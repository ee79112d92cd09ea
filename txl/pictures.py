"""matplotlib, imported only where something is drawn: that takes a third of a second."""

from typing import Any


def missing() -> str | None:
    """Why nothing can be drawn, in words; None if it can."""
    try:
        new_figure()
    except ImportError as error:
        return f'matplotlib cannot be used ({error}): pip install "txl-kernels[plots]"'
    return None


def new_figure(width: float = 7.0, height: float = 4.2) -> Any:
    """An empty figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure
