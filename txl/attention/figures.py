"""Figures 5, 6 and 7 of the paper, of any model with positions in its scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from txl.attention.averages import TERMS, Averages
from txl.attention.moment import Moment
from txl.paths import AnyPath
from txl.pictures import new_figure, save

NAMES = {"a": "(a) content", "b": "(b) content-dependent position", "d": "(d) global position bias"}
MARKED = 0.2  # of a row's weights, the largest: figure 6


def data(averages: Averages, moment: Moment, heads: Sequence[int]) -> dict[str, Tensor]:
    """What the figures draw, as it stands in them.

    heads: of figure 6, counted over all layers, from 0.

    Returns:
        figure_5, figure_7_a, figure_7_b, figure_7_d: [n_layer * H, W], a row a head, layer by
        layer, a column a distance, W - 1 .. 0. figure_6: [heads, T, W + T - 1], a row a target, a
        column a token from W before the first target on: its weight in a target's window, NaN
        outside.
    """
    found = {"figure_5": averages.mean().flip(1)}
    found |= {f"figure_7_{term}": averages.mean_of(term).flip(1) for term in TERMS}
    return found | {"figure_6": torch.stack([by_token(moment.weights[head]) for head in heads])}


def draw_average(averages: Averages, path: AnyPath) -> None:
    """Figure 5: a row a head, layer by layer from the top; a column a distance, the nearest at the
    right; darker is more."""
    figure = new_figure(7.0, 5.0)
    axes = figure.add_subplot()
    image = _map(axes, averages.mean(), averages.heads, _top(averages))
    axes.set_title("Mean attention of every head")
    figure.colorbar(image, ax=axes, label="mean weight", extend="max")
    save(figure, path)


def draw_terms(averages: Averages, path: AnyPath) -> None:
    """Figure 7: the same of the softmax of one term alone, in the shades of figure 5."""
    figure = new_figure(13.0, 4.6)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, term in zip(panels, TERMS, strict=True):
        image = _map(axes, averages.mean_of(term), averages.heads, _top(averages))
        axes.set_title(NAMES[term])
    figure.colorbar(image, ax=panels, label="mean weight", extend="max")
    save(figure, path)


def draw_heads(moment: Moment, heads: Sequence[int], path: AnyPath) -> None:
    """Figure 6: successive targets from the top, what each head sees of the text; the largest fifth
    of a row's weights in red.

    heads: counted over all layers, from 0.
    """
    figure = new_figure(9.0, 2.4 * len(heads) + 0.4)
    window = moment.weights.size(2)
    for axes, head in zip(figure.subplots(len(heads), 1, squeeze=False)[:, 0], heads, strict=True):
        axes.imshow(
            marked(moment.weights[head]).numpy(), aspect="auto", interpolation="nearest", cmap="Reds", vmin=0, vmax=1.4,
            extent=(-window, moment.count, moment.count, 0),
        )  # fmt: skip
        axes.set(
            title=f"head {head + 1}, of layer {head // moment.heads + 1}", xlabel="token, from the first target on",
            ylabel="target",
        )  # fmt: skip
    save(figure, path)


def marked(weights: Tensor) -> Tensor:
    """[T, W] by distance -> [T, W + T - 1] by token: 1 for the largest fifth of each row, 0 for the
    rest of its window, NaN beyond."""
    largest = weights.topk(max(round(MARKED * weights.size(1)), 1)).indices
    return by_token(torch.zeros_like(weights).scatter_(1, largest, 1.0))


def by_token(rows: Tensor) -> Tensor:
    """[T, W] by distance -> [T, W + T - 1] by token, NaN beyond a row's window."""
    count, window = rows.shape
    picture = rows.new_full((count, window + count - 1), torch.nan)
    for n, row in enumerate(rows):
        picture[n, n : n + window] = row.flip(0)
    return picture


def _top(averages: Averages) -> float:
    """The darkest shade: what all but a few cells stay below."""
    cells = averages.mean().flatten()
    return float(cells.kthvalue(max(int(0.998 * cells.numel()), 1)).values) or 1.0


def _map(axes: Any, rows: Tensor, heads: int, top: float) -> Any:
    from matplotlib.colors import PowerNorm

    window = rows.size(1)
    image = axes.imshow(
        rows.flip(1).numpy(), aspect="auto", interpolation="nearest", cmap="Greys", norm=PowerNorm(0.5, 0, top),
        extent=(-window, 0, len(rows), 0),
    )  # fmt: skip
    for layer in range(1, len(rows) // heads):
        axes.axhline(layer * heads, color="tab:blue", lw=0.4, alpha=0.6)
    axes.set(xlabel="relative location of the key", ylabel="head, layer by layer")
    return image
