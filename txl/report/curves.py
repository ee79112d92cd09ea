"""Pictures of a run as SVG, for its page."""

import io
from collections.abc import Callable
from typing import Any

from txl.evaluation.evaluate import Score
from txl.pictures import new_figure

MOST = 1e100  # of what can be drawn
CURVES = {"lr": "learning rate", "grad_norm": "norm of the gradient", "tokens_per_s": "tokens a second"}


def svg(draw: Callable[[Any], None], width: float = 7.0, height: float = 3.6) -> str:
    """What `draw` makes of a figure, as an SVG document."""
    figure = new_figure(width, height)
    draw(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    found = text.getvalue()
    return found[found.index("<svg") :]  # without the XML declaration: it stands inside HTML


def points(entries: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """The updates that have a value of this name, a number that can be drawn."""
    return [(e["step"], e[name]) for e in entries if isinstance(e.get(name), float) and abs(e[name]) < MOST]


def draw_loss(axes: Any, entries: list[dict[str, Any]], unit: str) -> None:
    """Training and validation loss; unit: "bpc", or "ppl" of words."""
    train, valid = points(entries, unit), points(entries, f"valid_{unit}")
    for values, style, label in ((train, "-", "training"), (valid, "o-", "validation")):
        axes.plot([x for x, _ in values], [y for _, y in values], style, label=label)
    if len(train) > 4:  # the first steps would flatten everything after them
        late = [y for _, y in train[len(train) // 20 :] + valid]
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set(xlabel="update", ylabel="bits per character" if unit == "bpc" else "perplexity", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()


def draw_course(figure: Any, entries: list[dict[str, Any]]) -> None:
    """Learning rate, gradient and speed against the update."""
    for axes, (name, title) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        values = points(entries, name)
        axes.plot([x for x, _ in values], [y for _, y in values])
        axes.set(xlabel="update", title=title)
        axes.grid(alpha=0.3)


def draw_lengths(axes: Any, scores: list[Score], levels: dict[str, Score], trained: int, unit: str) -> None:
    """Bits per character or perplexity against attention length; levels: drawn as lines across."""
    axes.plot([s.attn_len for s in scores], [value(s, unit) for s in scores], "o-", label="cached memory")
    for n, (label, score) in enumerate(levels.items()):
        axes.axhline(value(score, unit), color=f"C{n + 1}", ls="--", label=label)
    axes.axvline(trained, color="gray", ls=":", label="longest attention in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks([s.attn_len for s in scores], [str(s.attn_len) for s in scores])
    values = [value(s, unit) for s in [*scores, *levels.values()]]
    margin = 0.05 * (max(values) - min(values)) or 0.01
    axes.set_ylim(min(values) - margin, max(values) + margin)
    name = "bits per character" if unit == "bpc" else "perplexity"
    axes.set(xlabel="attention length (keys a token sees)", ylabel=name, title="What memory is worth")
    axes.grid(alpha=0.3)
    axes.legend()


def value(score: Score, unit: str) -> float:
    return score.bpc if unit == "bpc" else score.ppl
