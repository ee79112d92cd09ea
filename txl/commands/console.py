"""The terminal: messages, progress, and the options that several commands have."""

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from txl.errors import TxlError
from txl.training.trainer import OnEntry, Trainer

NO_DATA = "--data is not given: the text is Python's standard library"
LINES_S = 10.0  # seconds between the lines about training where there is no bar


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


def reason(error: Exception) -> str | None:
    """Return the message of an error that is expected: of input, files or memory, a number that
    overflows, or an invalid setting of the kernels; None for any other."""
    text = str(error)
    shown = " ".join(text.split())[:200]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"standard output: {error.strerror}"  # errors of files have a file name
    if isinstance(error, (TxlError, OSError)) or text.startswith("TXL_KERNELS_"):
        return text
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"there is not enough memory for these sizes ({shown or 'MemoryError'})"
    if isinstance(error, OverflowError) or "Storage size calculation overflowed" in text:
        return f"a number is beyond what can be computed with ({shown})"
    return None


class PatientConsole(Console):
    """Console that continues when its output's reader is closed; rich's own exits."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(sys.stdout.fileno())
        tell("the reader of the output is gone; the command goes on without it")


console = PatientConsole(emoji=False)  # names can hold text such as :smile:


def say(text: object) -> None:
    """Print a line without interpreting markup, so that file names appear as they are."""
    console.print(str(text), markup=False, highlight=False, soft_wrap=True)


def bar(*columns: ProgressColumn, transient: bool = False) -> Progress:
    """Make a progress bar, shown only on a terminal that can move its cursor, not in a file."""
    return Progress(*columns, console=console, transient=transient, disable=without_bar())


def without_bar() -> bool:
    """Whether the output cannot show a bar: it is a file, or a terminal without a cursor."""
    return not console.is_terminal or console.is_dumb_terminal


@contextmanager
def training_progress(trainer: Trainer) -> Iterator[OnEntry]:
    """A context with a bar: step, percentage, bpc or perplexity, tokens/s and remaining time, and a
    line for each evaluation. Without a bar: a line about every `LINES_S` seconds and at the end.

    Yields: a function that shows an entry passed by `Trainer.run`.
    """
    unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"  # bits per byte, or perplexity per word
    shown = bar(
        TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    task = shown.add_task("train", total=trainer.config.steps, completed=trainer.step, status="starting")
    last_line = -math.inf

    def report(entry: dict[str, Any]) -> None:
        nonlocal last_line
        steps, now = trainer.config.steps, time.monotonic()  # the number of steps can change with the clock
        if "loss" in entry:
            loss_text = f"{unit} {entry[unit]:.4f}"
            rate = f"{entry['tokens_per_s']:,.0f} tokens/s"
            shown.update(task, completed=entry["step"], total=steps, status=f"{loss_text}  {rate}")
            if not shown.disable or (now - last_line < LINES_S and entry["step"] < steps):
                return
            last_line, line = now, f"loss {entry['loss']:.4f}, {loss_text}, {rate}"
        else:
            line = f"validation loss {entry['valid_loss']:.4f}, {unit} {entry[f'valid_{unit}']:.4f}"
        console.print(f"step {entry['step']} of {steps}: {line}", highlight=False, soft_wrap=True)

    with shown:
        yield report


@contextmanager
def evaluation_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A context with a bar over the tokens to score; yields a function that takes their number."""
    text = TextColumn("{task.description}", markup=False)  # names can hold braces and brackets
    with bar(text, BarColumn(), TimeRemainingColumn(), transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda scored: shown.update(task, completed=scored)


def in_panel(panel: str, *names: str, help: str, show_default: bool | str = True, **kind: Any) -> Any:
    """Make an option that `--help` shows under the heading `panel`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=show_default, **kind)


Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
_CHECKPOINT = "A run folder (its best checkpoint is taken) or a .safetensors file."
Checkpoint = Annotated[Path, typer.Argument(help=_CHECKPOINT)]
CheckpointOrRun = Annotated[Path | None, typer.Argument(help=_CHECKPOINT, show_default=False)]
Run = Annotated[Path | None, typer.Option("--run", "-r", help="The same, as for txl train.", show_default=False)]


def one_of(checkpoint: Path | None, run: Path | None) -> Path:
    """Return the argument or --run; raise TxlError if none or both are given."""
    given = [x for x in (checkpoint, run) if x is not None]
    if len(given) != 1:
        raise TxlError(f"one checkpoint or run must be given, got {' and '.join(map(str, given)) or 'none'}")
    return given[0]


def pick_device(name: str) -> torch.device:
    """Return the device of a name; raise TxlError if torch does not know it or it is not
    available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise TxlError(f"device must be cpu, cuda or auto, got {name!r}")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TxlError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas; raise TxlError that names the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise TxlError(f"{option} takes whole numbers separated by commas, got {text!r}") from None
