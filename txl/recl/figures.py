"""Figures 3 and 4 of the paper, of any group of models."""

from txl.paths import AnyPath
from txl.pictures import label, new_figure, save
from txl.recl.result import FIGURE_RATIO, GroupResult


def draw_gains(result: GroupResult, path: AnyPath) -> None:
    """Figure 3: e^f(c, c) - e^f(c, c') of each step, at r = 0.1 or the smallest ratio there is."""
    ratio = FIGURE_RATIO if FIGURE_RATIO in result.effective else min(result.effective)
    figure = new_figure()
    axes = figure.add_subplot()
    steps = [f"{a}\n{b}" for a, b in zip(result.contexts[:-1], result.contexts[1:], strict=True)]
    for name, found in result.effective[ratio].items():
        axes.plot(steps, [a - b for a, b in zip(found.short, found.long, strict=True)], "o-", label=label(name))
    axes.set(
        xlabel="from a context of c (above) to c' (below), tokens",
        ylabel="$e^{f(c, c)} - e^{f(c, c')}$",
        title=f"Gain of a longer context over the group's best, r = {ratio:g}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def draw_perplexity(result: GroupResult, path: AnyPath) -> None:
    """Figure 4: perplexity against context."""
    figure = new_figure()
    axes = figure.add_subplot()
    for name, values in result.perplexity.items():
        axes.plot(result.contexts, values, "o-", label=label(name))
    axes.set(xlabel="context, tokens", ylabel="perplexity of a token", title="Perplexity against context")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
