"""Progress on the terminal, or as lines in a file."""

import math
import os
import sys
import time
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from txl.training.trainer import Trainer

_T = TypeVar("_T", bound="_Shown")


def discard(descriptor: int) -> None:
    """Discard everything written to a file descriptor from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def tell(text: str) -> None:
    """Print to stderr, ignoring a closed reader (`txl train 2>&1 | tee log`)."""
    try:
        print(text + "\n", end="", file=sys.stderr, flush=True)  # one write, since several processes may print
    except BrokenPipeError:
        discard(2)


def one_line(why: str) -> str:
    """Return a message as one line, even if file names in it have line ends."""
    return "error: " + why.replace("\n", "\\n").replace("\r", "\\r")


def output_is_gone() -> None:
    """Report on stderr that the reader of stdout has closed it, and discard further output."""
    discard(sys.stdout.fileno())
    tell("the reader of the output is gone; the command goes on without it")


class PatientConsole(Console):
    """Console that continues when its output's reader is closed; rich's own exits."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        output_is_gone()


class _Shown:
    """Base of progress reports whose bar is shown while a with block runs."""

    _bar: Progress

    def __enter__(self: _T) -> _T:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def shows_bars(console: Console) -> bool:
    """Whether a bar can be redrawn: on a terminal that can move its cursor, not in a file."""
    return console.is_terminal and not console.is_dumb_terminal


class Bar(Progress):
    """Progress bar, shown only if it can be redrawn. It is two columns narrower than the terminal,
    so that an echoed ^C does not wrap to a new line."""

    def __init__(self, console: Console, *columns: ProgressColumn, transient: bool = False) -> None:
        self._shown_on = console  # rich's own attribute does not exist yet when it first calls get_renderable
        super().__init__(*columns, console=console, transient=transient, disable=not shows_bars(console))

    def get_renderable(self) -> RenderableType:
        return Constrain(super().get_renderable(), self._shown_on.width - 2)


class TrainingProgress(_Shown):
    """A bar with step, percentage, bpc or perplexity, tokens/s and remaining time; a line for each
    evaluation.

    Without a terminal: a line about every `SECONDS` seconds and at the end.
    """

    SECONDS = 10.0

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self._console = console
        # The loss is shown as bits per byte, or as perplexity per word.
        self._unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"
        self._bar = Bar(
            console,
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._task = self._bar.add_task("train", total=trainer.config.steps, completed=trainer.step, status="starting")
        self._trainer, self._last_line = trainer, -math.inf

    def report(self, entry: dict[str, Any]) -> None:
        """Show an entry passed by `Trainer.run`. A closed reader does not end the training."""
        try:
            self._report(entry)
        except BrokenPipeError:
            output_is_gone()

    def _report(self, entry: dict[str, Any]) -> None:
        if "loss" in entry:
            measure, rate = f"{self._unit} {entry[self._unit]:.4f}", f"{entry['tokens_per_s']:,.0f} tokens/s"
            steps, now = self._trainer.config.steps, time.monotonic()  # the number of steps can change with the clock
            self._bar.update(self._task, completed=entry["step"], total=steps, status=f"{measure}  {rate}")
            if self._bar.disable and (now - self._last_line >= self.SECONDS or entry["step"] == steps):
                self._last_line = now
                self._line(entry, f"loss {entry['loss']:.4f}, {measure}, {rate}")
        else:
            told = f"{self._unit} {entry[f'valid_{self._unit}']:.4f}"
            self._line(entry, f"validation loss {entry['valid_loss']:.4f}, {told}")

    def _line(self, entry: dict[str, Any], text: str) -> None:
        steps = self._trainer.config.steps
        self._console.print(f"step {entry['step']} of {steps}: {text}", highlight=False, soft_wrap=True)


class EvaluationProgress(_Shown):
    """A progress bar over the tokens to score."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        told = TextColumn("{task.description}", markup=False)  # names can hold braces and brackets
        self._bar = Bar(console, told, BarColumn(), TimeRemainingColumn(), transient=True)
        self._task = self._bar.add_task(title, total=total)

    def update(self, scored: int) -> None:
        self._bar.update(self._task, completed=scored)
