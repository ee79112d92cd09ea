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
_CLEAR_LINE = "\r\x1b[2K"  # of a bar, and of the ^C that the terminal shows


@contextmanager
def stop_on_ctrl_c(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C lets the trainer finish its update and write a checkpoint.

    The second ends at once. Where Ctrl-C is ignored (`nohup`, a script's background job) it stays
    so.
    """
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        trainer.request_stop()
        signal.signal(signal.SIGINT, previous)
        # Not print: what the signal interrupts may be half way through one.
        with suppress(OSError):
            os.write(2, ((_CLEAR_LINE if os.isatty(2) else "") + FINISHING).encode())

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def tell_saved(trainer: Trainer, options: list[str]) -> None:
    """Where the checkpoint of an interrupted run is, and the command that goes on, on stderr.

    options: of `txl train` that a run's folder does not keep.
    """
    command = ["txl", "train", "--run", str(trainer.folder), "--resume", *options]
    tell(f"interrupted: {trainer.step:,} of {trainer.config.steps:,} updates are in {trainer.last}")
    tell(f"go on with: {shlex.join(command)}")
