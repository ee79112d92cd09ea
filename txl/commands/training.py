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
from txl.model.config import Config, ModelConfig, RecurrentConfig
from txl.model.transformer import count_parameters
from txl.paper.recurrent import RecurrentNetwork
from txl.training.run import read_log
from txl.training.trainer import Trainer
from txl_kernels.backends import choose_unasked

FINISHING = "finishing this update; Ctrl-C again ends at once\n"
_LAST_WORDS_S = 5  # seconds until SIGALRM ends the process
_CLEAR_LINE = "\r\x1b[2K"  # clears a progress bar, and the ^C that the terminal echoes


def train_on_terminal(trainer: Trainer, seconds: float | None = None) -> None:
    """Train to the end, or until Ctrl-C, which ends the training after the current update with a
    checkpoint; seconds: as in `Trainer.run`."""
    with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
        trainer.run(progress.report, seconds)


def run_training(trainer: Trainer, kept: list[str], seconds: float | None = None) -> None:
    """Run `train_on_terminal` and draw the loss; after a Ctrl-C, print how to resume.

    kept: options that must be repeated on resume.
    """
    try:
        train_on_terminal(trainer, seconds)
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
        entries, _ = read_log(trainer.folder / "log.jsonl")
        pictures.draw_loss(entries, trainer.folder / "loss.png", unit)
    except OSError as error:  # such as a full disk; the run itself is complete
        return str(error)
    return None


def header(trainer: Trainer) -> str:
    """Return the header: model, parameters, backend, tokens per update, and remaining updates."""
    config, training = trainer.model.config, trainer.config
    size = f"{config.n_layer} layers x {config.d_model}, {count_parameters(trainer.model) / 1e6:.2f}M parameters"
    tokens = training.batch * training.scored * training.accumulate
    dtype = trainer.updater.dtype
    taken = "torch"
    if not isinstance(trainer.model, RecurrentNetwork):
        width = getattr(trainer.model.layers[0].attention, "kernel_width", trainer.model.config.d_head)
        taken = _attention(trainer.model.config, width, trainer.device, dtype)
    by = _computed_by(taken, trainer.device, dtype, trainer.world.size)
    return f"{_kind(config)}, {size}; {by}; {tokens:,} tokens an update; updates {trainer.step:,} to {training.steps:,}"


def _kind(config: Config) -> str:
    if isinstance(config, RecurrentConfig):
        return config.network.upper()
    kind = "Transformer-XL" if config.encoding == "relative" else f"Transformer with {config.encoding} positions"
    return kind if config.mem_len else f"{kind}, without memory"


def _attention(config: ModelConfig, width: int, device: torch.device, dtype: torch.dtype | None) -> str:
    """Return the name of the backend that computes attention with heads of this width."""
    if config.absolute:  # the kernels only compute attention with positions in the scores
        return "torch's attention"
    return f"{choose_unasked(device, dtype or torch.float32, width)} backend"


def _computed_by(taken: str, device: torch.device, dtype: torch.dtype | None, processes: int) -> str:
    """Describe the backend, device or threads, number of processes, and autocast's dtype."""
    if device.type == "cuda":
        count = "" if processes == 1 else f"{processes} x "
        where = f"{taken} on {count}{torch.cuda.get_device_name(device)}"
    else:
        threads = torch.get_num_threads()
        count = "" if processes == 1 else f"{processes} processes, "
        where = f"{taken}, {count}{threads} thread{'' if threads == 1 else 's'}{' each' if count else ''}"
    return where if dtype is None else f"{where}, {str(dtype).removeprefix('torch.')}"


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
    signals = [one for one in signals if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    previous = {one: signal.getsignal(one) for one in signals}

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(number, previous[signal.Signals(number)])
        # Not print: the signal may have interrupted a call of print.
        if trainer.world.first:
            with suppress(OSError):
                os.write(2, ((_CLEAR_LINE if os.isatty(2) else "") + FINISHING).encode())

    for one in signals:
        signal.signal(one, handler)
    try:
        yield
    finally:
        for one in signals:
            signal.signal(one, previous[one])
