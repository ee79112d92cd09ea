"""Training on a terminal, as in `txl train` and `txl demo`: header, progress, Ctrl-C with a
checkpoint, and the processes of torchrun."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

import torch

from txl import pictures
from txl.commands.console import TrainingProgress, one_line, tell
from txl.commands.options import console, pick_device
from txl.distributed import SharedError, World, joined, launched, local_device, settle
from txl.errors import Interrupted
from txl.model.config import RecurrentConfig
from txl.model.transformer import TransformerXL, count_parameters
from txl.training.run import read_log
from txl.training.trainer import Trainer
from txl_kernels.backends import choose_unasked

FINISHING = "finishing this update; Ctrl-C again ends at once\n"
_LAST_WORDS_S = 5  # seconds until SIGALRM ends the process
_CLEAR_LINE = "\r\x1b[2K"  # clears a progress bar, and the ^C that the terminal echoes


def run_training(trainer: Trainer, kept: list[str], seconds: float | None = None) -> None:
    """Train to the end, or until Ctrl-C, which ends the training after the current update with a
    checkpoint; then draw the loss and print how to resume.

    kept: options that must be repeated on resume. seconds: as in `Trainer.run`.
    """
    try:
        with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
            trainer.run(progress.report, seconds)
    except Interrupted:
        if trainer.world.first:
            size = str(trainer.world.size)
            command = ["txl"] if size == "1" else ["torchrun", "--nproc-per-node", size, "-m", "txl"]
            command += ["train", "-r", str(trainer.folder), "--resume", *kept]
            tell(f"interrupted: {trainer.step:,} of {trainer.config.steps:,} updates are in {trainer.last}")
            tell(f"go on with: {shlex.join(command)}")
            draw_loss(trainer)
        raise


def draw_loss(trainer: Trainer) -> str | None:
    """Draw `loss.png` in the run's folder; return the reason if it cannot be drawn, else None."""
    reason = pictures.missing()
    if reason is not None:
        return reason
    unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"
    try:
        pictures.draw_loss(read_log(trainer.folder / "log.jsonl"), trainer.folder / "loss.png", unit)
    except OSError as error:  # such as a full disk; the run itself is complete
        return str(error)
    return None


def header(trainer: Trainer, minutes: float | None = None) -> str:
    """Return the header: model, parameters, backend, device, dtype, and updates or time."""
    model, config, dtype = trainer.model, trainer.model.config, trainer.updater.dtype or torch.float32
    by = "torch"
    if isinstance(config, RecurrentConfig):
        kind = config.network.upper()
    else:
        kind = "Transformer-XL" if config.encoding == "relative" else f"Transformer with {config.encoding} positions"
        kind += "" if config.mem_len else ", without memory"
    if isinstance(model, TransformerXL) and not model.config.absolute:  # else torch's attention, or none
        width = getattr(model.layers[0].attention, "kernel_width", model.config.d_head)
        by = f"{choose_unasked(trainer.device, dtype, width)} backend"
    span = f"updates {trainer.step:,} to {trainer.config.steps:,}" if minutes is None else f"for {minutes:g} minutes"
    return (
        f"{kind}, {config.n_layer} layers x {config.d_model}, {count_parameters(model) / 1e6:.2f}M parameters; {by} on "
        f"{trainer.device}, {str(dtype).removeprefix('torch.')}; {span}"
    )


@contextmanager
def processes(device: str) -> Iterator[tuple[World, torch.device]]:
    """A context with the process group that torchrun started and this process's device; only the
    first process prints."""
    where = pick_device(local_device(device))
    with _last_words() if launched() else nullcontext(), joined(where) as world:
        console.quiet = console.quiet or not world.first
        try:
            yield world, where
        except SharedError as error:
            if world.rank == error.rank:
                tell(one_line(str(error)))
            settle()
            sys.exit(1)
        except Interrupted:
            settle()
            raise
        except KeyboardInterrupt:
            if not world.first:  # reported once
                sys.exit(130)
            raise


@contextmanager
def _last_words() -> Iterator[None]:
    """A context in which SIGTERM, which torchrun sends to all processes when one fails, lets this
    process run for `_LAST_WORDS_S` more seconds to report the failure it saw; a second SIGTERM ends
    it at once."""

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(_LAST_WORDS_S)

    previous = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, previous)  # not restored after an error, which is still to be reported
    signal.alarm(0)


@contextmanager
def stop_on_ctrl_c(trainer: Trainer) -> Iterator[None]:
    """A context in which the first Ctrl-C lets the trainer finish its update and write a
    checkpoint.

    A second Ctrl-C ends the process at once. If Ctrl-C is ignored (`nohup`, a script's background
    job), it remains ignored. With several processes any of them may receive it, and SIGTERM, which
    torchrun passes on, has the same effect.
    """
    signals = [signal.SIGINT] if trainer.world.size == 1 else [signal.SIGINT, signal.SIGTERM]
    previous = {one: signal.getsignal(one) for one in signals}
    previous = {one: handler for one, handler in previous.items() if handler not in (signal.SIG_IGN, None)}

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(number, previous[signal.Signals(number)])
        # Not print: the signal may have interrupted a call of print.
        if trainer.world.first:
            with suppress(OSError):
                os.write(2, ((_CLEAR_LINE if os.isatty(2) else "") + FINISHING).encode())

    for one in previous:
        signal.signal(one, handler)
    try:
        yield
    finally:
        for one, former in previous.items():
            signal.signal(one, former)
