"""Progress on the terminal, and a Ctrl-C that loses nothing."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from txl.training.trainer import Trainer

_T = TypeVar("_T", bound="_Shown")


def discard(descriptor: int) -> None:
    """What is written to a descriptor goes nowhere from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def output_is_gone() -> None:
    """Says on stderr that nobody reads what is printed, and prints to nowhere from now on."""
    discard(sys.stdout.fileno())
    print("the reader of the output is gone; the command goes on without it", file=sys.stderr)


class PatientConsole(Console):
    """Goes on when nobody reads its output; rich's own ends the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        output_is_gone()


class _Shown:
    """A bar that is on the screen inside a with statement."""

    _bar: Progress

    def __enter__(self: _T) -> _T:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TrainingProgress(_Shown):
    """A bar with step, loss, bpc or perplexity, tokens/s and time left.

    Without a terminal: a line at each evaluation.
    """

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self._console = console
        # What is told of a loss: bits a byte, or the perplexity of a word.
        self._unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"
        self._bar = Progress(
            TextColumn("step {task.completed:>6.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=trainer.config.steps, completed=trainer.step, status="starting")

    def report(self, entry: dict[str, Any]) -> None:
        """Takes what `Trainer.run` reports. A reader that is gone does not end the training."""
        try:
            self._report(entry)
        except BrokenPipeError:
            output_is_gone()

    def _report(self, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            status = (
                f"loss {entry['loss']:.4f}  {self._unit} {entry[self._unit]:.4f}  {entry['tokens_per_s']:,.0f} tokens/s"
            )
            self._bar.update(self._task, completed=entry["step"], status=status)
        else:
            told = f"{self._unit} {entry[f'valid_{self._unit}']:.4f}"
            line = f"step {entry['step']:>6}: validation loss {entry['valid_loss']:.4f}, {told}"
            self._console.print(line, highlight=False)


class EvaluationProgress(_Shown):
    """A bar over the tokens to score."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._bar = Progress(
            TextColumn(title), BarColumn(), TimeRemainingColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=total)

    def update(self, scored: int) -> None:
        self._bar.update(self._task, completed=scored)


@contextmanager
def stop_on_ctrl_c(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C lets the trainer finish its update and write a checkpoint.

    The second ends at once.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
