"""A Ctrl-C that loses nothing, and says so."""

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from txl.commands.console import tell
from txl.training.trainer import Trainer

FINISHING = "finishing this update; Ctrl-C again ends at once\n"
_LAST_WORDS_S = 5  # then SIGALRM ends the process
_CLEAR_LINE = "\r\x1b[2K"  # of a bar, and of the ^C that the terminal shows


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


@contextmanager
def last_words() -> Iterator[None]:
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
def stop_on_sigterm() -> Iterator[None]:
    """SIGTERM, which torchrun sends to all when one process fails, ends this one as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def tell_saved(trainer: Trainer, options: list[str]) -> None:
    """Where the checkpoint of an interrupted run is, and the command that goes on, on stderr.

    options: of `txl train` that a run's folder does not keep.
    """
    command = ["txl", "train", "--run", str(trainer.folder), "--resume", *options]
    tell(f"interrupted: {trainer.step:,} of {trainer.config.steps:,} updates are in {trainer.last}")
    tell(f"go on with: {shlex.join(command)}")
