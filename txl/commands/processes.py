"""A command as one of several processes, or as the one that starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import torch
import typer

from txl.commands.console import tell
from txl.commands.interrupt import last_words
from txl.commands.options import console, pick_device
from txl.distributed.join import joined, launched, local_device, settle
from txl.distributed.world import SharedError, World
from txl.training.trainer import Interrupted

Devices = Annotated[
    int | None,
    typer.Option(
        help="Processes to start here by torchrun, one a GPU, or on a CPU's cores with --device cpu. Several machines: "
        "torchrun -m txl itself.",
        show_default=False,
    ),
]


@contextmanager
def processes(device: str, *, group: bool = False) -> Iterator[tuple[World, torch.device]]:
    """All processes that torchrun started, and this one's device; only the first one speaks.

    group: a process group even for one that is alone.
    """
    where = pick_device(local_device(device))
    with last_words() if launched() else nullcontext(), joined(where, always=group) as world:
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


def start_processes(count: int, device: str) -> None:
    """This very command in so many processes; ends with their exit code unless that is 0."""
    from txl.distributed.launch import check_devices, run_on_devices, without_option

    check_devices(count, device)
    code = run_on_devices(count, without_option(sys.argv[1:]))
    if code:
        sys.exit(code)


def one_line(why: str) -> str:
    """What is said of an error, whatever file names hold."""
    return "error: " + why.replace("\n", "\\n").replace("\r", "\\r")
