"""Figures: their ticks, where an axis counts steps, heads, tokens or positions."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from txl import pictures
from txl.paper import attention_maps, recl
from txl.paper.attention_maps import Attention


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those drawn, instead of saved."""
    drawn: list[Any] = []
    for module in (pictures, attention_maps, recl):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure))
    return drawn


def ticks(axis: Any) -> list[float]:
    axis.figure.canvas.draw()
    low, high = sorted(axis.get_view_interval())
    return [float(tick) for tick in axis.get_majorticklocs() if low <= tick <= high]


@pytest.mark.parametrize("steps", [[3], [1, 2, 3], list(range(10, 31, 10)), list(range(100, 20_001, 100))])
def test_updates_are_whole(steps: list[int], figures: list[Any]) -> None:
    pictures.draw_loss([{"step": n, "bpc": 1.0 + 1 / n} for n in steps], Path("x"), "bpc")
    found = ticks(figures[0].axes[0].xaxis)
    assert found
    assert all(tick.is_integer() for tick in found), found


@pytest.mark.parametrize(
    ("layers", "heads", "window", "targets"), [(1, 1, 2, 2), (1, 2, 3, 1), (2, 2, 16, 5), (3, 8, 64, 64)]
)
def test_heads_and_tokens_are_whole(layers: int, heads: int, window: int, targets: int, figures: list[Any]) -> None:
    attention = Attention(layers, heads, window, 0, targets)
    weights = torch.rand(heads, targets, window).softmax(-1)
    attention.add(0, [dict.fromkeys(("all", *attention_maps.TERMS), weights)] * layers)
    attention_maps.draw_means(attention, attention_maps.TERMS, Path("x"))
    attention_maps.draw_heads(attention, [0], Path("x"))
    panels = [axes for figure in figures for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert len(panels) == 4
    for axes in panels:
        for axis in (axes.xaxis, axes.yaxis):
            found = ticks(axis)
            assert found
            assert all(tick.is_integer() for tick in found), found


@pytest.mark.parametrize("contexts", [[1, 2], [8, 16, 24], [100 * n for n in range(1, 11)]])
def test_contexts_are_whole(contexts: list[int], figures: list[Any]) -> None:
    recl.draw_perplexity({"a": [3.0 + 1 / n for n in contexts]}, contexts, Path("x"))
    assert all(tick.is_integer() for tick in ticks(figures[0].axes[0].xaxis))
    effective = recl.Effective(1, True, [3.0] * (len(contexts) - 1), [2.5] * (len(contexts) - 1), [])
    recl.draw_gains({"a": effective}, contexts, 0.1, Path("x"))
    labels = [label.get_text() for label in figures[1].axes[0].get_xticklabels()]
    assert labels == [f"{a}\n{b}" for a, b in pairwise(contexts)]
