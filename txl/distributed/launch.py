"""`--devices N`: torchrun on this machine, started by the command itself."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from txl.distributed.join import launched
from txl.errors import TxlError

_OPTION = "--devices"


def check_devices(count: int, device: str) -> None:
    """Raises TxlError if a command cannot start so many processes here."""
    if count < 1:
        raise TxlError(f"{_OPTION} must be >= 1, got {count}")
    if launched():
        raise TxlError(f"{_OPTION} starts torchrun; under torchrun leave it out")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if (device.startswith("cuda") or gpus) and count > gpus:
        raise TxlError(
            f"{_OPTION} must be at most {gpus}, the GPUs of this machine, got {count}; --device cpu takes no GPU"
        )


def run_on_devices(count: int, arguments: Sequence[str]) -> int:
    """Runs `txl` with these arguments in `count` processes, and waits for them.

    What each prints comes out as it is. Ctrl-C is passed on to all.

    Returns:
        the exit code: that of the process that failed first, 1 if a signal ended it.

    Raises:
        TxlError: a signal ended a process, or none could be started.
    """
    # Cores are shared out; torchrun's own default is one thread each.
    threads = max(len(os.sched_getaffinity(0)) // count, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=str(uuid.uuid4()), rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    logging.disable(logging.ERROR)  # what torchrun would log is in our own lines
    try:
        elastic_launch(config, sys.executable)("-m", "txl", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        raise TxlError(f"rank {rank} was ended by {failure.signal_name()}; the others were stopped") from error
    except SignalException:
        return 130
    except (RuntimeError, OSError) as error:
        raise TxlError(f"{count} processes cannot be started: {error}") from error
    return 0


def without_option(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command without `--devices N`."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(f"{_OPTION}="):
            skip = False
        elif argument == _OPTION:
            skip = True
        else:
            kept.append(argument)
    return kept
