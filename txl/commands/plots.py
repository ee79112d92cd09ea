"""Plots of a run as PNG files, made from records after a run, never during it."""

from txl.evaluation.evaluate import Score
from txl.paths import AnyPath
from txl.pictures import new_figure, save
from txl.report import curves
from txl.training.log import read as read_log


def loss_curve(log: AnyPath, path: AnyPath, bytewise: bool = True) -> None:
    """Training and validation loss against the update, from a run's `log.jsonl`.

    bytewise: in bits per character; else the perplexity of a word.
    """
    entries, _ = read_log(log)
    figure = new_figure()
    curves.draw_loss(figure.add_subplot(), entries, "bpc" if bytewise else "ppl")
    save(figure, path)


def attention_length(scores: list[Score], levels: dict[str, Score], trained: int, path: AnyPath) -> None:
    """Bits per character against attention length; levels: lines across, `trained` a vertical."""
    figure = new_figure()
    curves.draw_lengths(figure.add_subplot(), scores, levels, trained, "bpc")
    save(figure, path)
