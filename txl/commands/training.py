"""Training as `txl train` and `txl demo` show it: its heading, its progress, a Ctrl-C
that loses nothing, and the processes of torchrun."""

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
_LAST_WORDS_S = 5  # then SIGALRM ends the process
_CLEAR_LINE = "\r\x1b[2K"  # of a bar, and of the ^C that the terminal shows


def train_on_terminal(trainer: Trainer, seconds: float | None = None) -> None:
    """Trains to the end, or to a Ctrl-C, which lets the update in progress end with a checkpoint;
    seconds: as `Trainer.run` takes them."""
    with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
        trainer.run(progress.report, seconds)


def run_training(trainer: Trainer, kept: list[str], seconds: float | None = None) -> None:
    """`train_on_terminal`; after a Ctrl-C the way on is told and the loss drawn.

    kept: options that are to be given again on resume.
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
    """Draws `loss.png` into the run's folder; returns why it could not, or None."""
    reason = pictures.missing()
    if reason is not None:
        return reason
    unit = "bpc" if trainer.corpus.vocabulary.unit == "bytes" else "ppl"
    try:
        entries, _ = read_log(trainer.folder / "log.jsonl")
        pictures.draw_loss(entries, trainer.folder / "loss.png", unit)
    except OSError as error:  # a full disk: the run is there without
        return str(error)
    return None


def header(trainer: Trainer) -> str:
    """Model, parameters, what computes it, tokens an update, and the updates there are to do."""
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
    """The name of the backend that computes attention with heads of a width."""
    if config.absolute:  # ours has positions in the scores
        return "torch's attention"
    return f"{choose_unasked(device, dtype or torch.float32, width)} backend"


def _computed_by(taken: str, device: torch.device, dtype: torch.dtype | None, processes: int) -> str:
    """That, on which device or how many threads, in how many processes, and autocast's dtype."""
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
    """All processes that torchrun started, and this one's device; only the first one speaks."""
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
            if not world.first:  # it is said once
                sys.exit(130)
            raise


@contextmanager
def _last_words() -> Iterator[None]:
    """SIGTERM, which torchrun sends to all when one process fails, leaves this one seconds to say
    what it saw of that; a second one ends it at once."""

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(_LAST_WORDS_S)

    previous = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, previous)  # not after an error: it is still to be told
    signal.alarm(0)


@contextmanager
def stop_on_ctrl_c(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C lets the trainer finish its update and write a checkpoint.

    The second ends at once. Where Ctrl-C is ignored (`nohup`, a script's background job) it stays
    so. Of several processes any may get it, and SIGTERM, which torchrun passes on, does the same.
    """
    signals = [signal.SIGINT] if trainer.world.size == 1 else [signal.SIGINT, signal.SIGTERM]
    signals = [one for one in signals if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    previous = {one: signal.getsignal(one) for one in signals}

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(number, previous[signal.Signals(number)])
        # Not print: what the signal interrupts may be half way through one.
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
