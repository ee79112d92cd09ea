"""Rows dealt to processes that torchrun started, each on a device of its own."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from txl.commands.console import PatientConsole, tell
from txl.distributed.tasks import Tasks
from txl.distributed.world import World
from txl.sweeps.devices import FINISHING
from txl.sweeps.faults import reason
from txl.sweeps.ledger import Ledger
from txl.sweeps.lines import Lines
from txl.sweeps.plan import Plan
from txl.sweeps.row import run_row
from txl.text.corpus import Corpus
from txl.training.trainer import Interrupted


def run_rows(
    ledger: Ledger, plans: Sequence[Plan], corpus: Corpus, device: torch.device, world: World,
    keep: Callable[[dict[str, str]], object],
) -> dict[str, str]:  # fmt: skip
    """Runs rows, each in one process, and waits for all; why rows failed, by name.

    plans: of the rows that are not finished. keep: called by the first process after a row of its
    own, with its failures.

    Raises:
        Interrupted: one of the processes got Ctrl-C or SIGTERM; every row has its checkpoint.
        TxlError: another process is lost; the rows of the others have their checkpoints.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    console, own = PatientConsole(emoji=False), f"[rank {world.rank}]"  # every process says its rows
    watch = Lines(lambda line: console.print(f"{own} {line}", markup=False, highlight=False, soft_wrap=True))
    errors: dict[str, str] = {}
    with Tasks(world, len(plans), watch.stop) as tasks, _stops_on_signals(tasks, watch, world):
        for number in tasks:
            name = plans[number].name
            try:
                run_row(ledger, plans[number], corpus, device, watch)
            except Interrupted:
                tell(f"{own} {name}: interrupted, to go on from its last checkpoint")
                continue
            except Exception as error:
                errors[name] = reason(error, ledger.folder / name)
                tasks.failed(number, errors[name])
                tell(f"{own} {name} failed: {errors[name]}".replace("\n", "\\n"))
            else:
                watch.say(f"{name}: done")
            if world.first:
                keep(errors)
        failures = tasks.finish()
    if failures is None:
        raise Interrupted
    return {plans[number].name: why for number, why in failures.items()}


@contextmanager
def _stops_on_signals(tasks: Tasks, watch: Lines, world: World) -> Iterator[None]:
    """The first Ctrl-C, or SIGTERM as torchrun sends it, stops all processes, the second ends this
    one; one that is ignored (`nohup`) stays so."""
    handled = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) not in (signal.SIG_IGN, None)]
    previous = {one: signal.getsignal(one) for one in handled}

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous[signal.Signals(number)])
        tasks.stop()
        watch.stop()
        if world.first:
            with suppress(OSError):
                os.write(2, FINISHING.encode())  # as in txl.commands.interrupt

    for one in handled:
        signal.signal(one, handler)
    try:
        yield
    finally:
        for one in handled:
            signal.signal(one, previous[one])
