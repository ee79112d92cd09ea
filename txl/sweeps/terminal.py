"""A row in this process, as the terminal shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from txl.commands.console import EvaluationProgress, TrainingProgress
from txl.commands.header import header
from txl.commands.interrupt import stop_on_ctrl_c
from txl.commands.options import console, say
from txl.evaluation.evaluate import Score
from txl.training.trainer import Report, Trainer


class Terminal:
    """A `Watch` with bars; the first Ctrl-C ends the update in progress."""

    @contextmanager
    def training(self, name: str, trainer: Trainer) -> Iterator[Report]:
        say(f"{name}: {header(trainer)}")
        with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
            yield progress.report

    @contextmanager
    def scoring(self, name: str, attn_len: int, total: int) -> Iterator[Callable[[int], None]]:
        with EvaluationProgress(console, f"{name}: attention length {attn_len}", total) as progress:
            yield progress.update

    def scored(self, name: str, score: Score) -> None:
        say(scored_line(name, score))


def scored_line(name: str, score: Score) -> str:
    return f"{name}: attention length {score.attn_len}, ppl {score.ppl:.2f}, {score.tokens_per_s:,.0f} tokens/s"
