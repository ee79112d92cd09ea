"""Plots, made from records after a run, never during it."""

import math
from typing import Any

from txl.evaluation.score import Score
from txl.paths import AnyPath
from txl.training.log import read as read_log


def missing() -> str | None:
    """Why nothing can be drawn, in words; None if it can."""
    try:
        _figure()
    except ImportError as error:
        return f'matplotlib cannot be used ({error}): pip install "txl-kernels[plots]"'
    return None


def _figure() -> Any:
    """An empty figure; matplotlib is imported here, since that takes a third of a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    return figure


def loss_curve(log: AnyPath, path: AnyPath, bytewise: bool = True) -> None:
    """Training and validation loss against the update, from a run's `log.jsonl`.

    bytewise: in bits per character; else the perplexity of a word.
    """
    unit, name = ("bpc", "bits per character") if bytewise else ("ppl", "perplexity")
    entries, _ = read_log(log)
    train, valid = _points(entries, unit), _points(entries, f"valid_{unit}")
    figure = _figure()
    axes = figure.add_subplot()
    for points, style, label in ((train, "-", "training"), (valid, "o-", "validation")):
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
    if len(train) > 4:  # the first steps would flatten everything after them
        late = [y for _, y in train[len(train) // 20 :] + valid]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="update", ylabel=name, title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _points(entries: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """The updates that have a value of this name, a finite one."""
    return [(e["step"], e[name]) for e in entries if isinstance(e.get(name), float) and math.isfinite(e[name])]


def attention_length(scores: list[Score], no_memory: Score | None, trained: int, path: AnyPath) -> None:
    """Bits per character against attention length; `no_memory` is a level, `trained` a vertical."""
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot([s.attn_len for s in scores], [s.bpc for s in scores], "o-", label="cached memory")
    if no_memory is not None:
        axes.axhline(no_memory.bpc, color="tab:red", ls="--", label=f"no memory, segments of {no_memory.attn_len}")
    axes.axvline(trained, color="gray", ls=":", label="longest attention in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks([s.attn_len for s in scores], [str(s.attn_len) for s in scores])
    values = [s.bpc for s in scores] + ([no_memory.bpc] if no_memory else [])
    margin = 0.05 * (max(values) - min(values)) or 0.01
    axes.set_ylim(min(values) - margin, max(values) + margin)
    axes.set(xlabel="attention length (keys a token sees)", ylabel="bits per character", title="What memory is worth")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
