"""Into a world and out of it: torchrun's variables, process groups, lost peers."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from txl.distributed.world import World
from txl.errors import TxlError

# A process that does nothing for so long is taken for lost. One that dies is noticed at once.
TIMEOUT = timedelta(minutes=10)
_LEAVING_S = 10.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOST = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo")


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(name: str) -> str:
    """The device that a name means here: under torchrun "cuda" is this process's GPU, and so is
    "auto" where there are GPUs.

    Raises:
        TxlError: a machine has fewer GPUs than processes, or one GPU is named for all of them.
    """
    if not launched() or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    if name not in ("auto", "cuda"):
        raise TxlError(f"device must be cpu, cuda or auto where there are several processes, got {name!r}")
    place, here = _number("LOCAL_RANK"), torch.cuda.device_count()
    if place >= here:
        raise TxlError(f"device {name!r}: this machine has {here} GPUs, too few for process {place} (counted from 0)")
    return f"cuda:{place}"


@contextmanager
def joined(device: torch.device, *, always: bool = False) -> Iterator[World]:
    """The world that torchrun started; alone without torchrun.

    A default process group that is there is used, and left.

    device: of this process; a CPU's talk by gloo, GPUs by NCCL.
    always: a process group even for a process that is alone, as FSDP needs one.

    Raises:
        TxlError: the processes cannot meet (a port in use, a process that does not come), or later
            another one is lost.
    """
    if not launched():
        if not always:
            yield World()
            return
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            yield World()
        finally:
            dist.destroy_process_group()
        return
    world = World(_number("RANK"), _number("WORLD_SIZE"))
    own = not dist.is_initialized()
    if own:
        _meet(device, world)
    lost = False
    try:
        yield world
    except TxlError:
        raise
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        lost = True
        raise TxlError(
            f"rank {world.rank}: another process has ended or does not answer, so this one ends, too; what was saved is "
            f"kept, --resume goes on from it ({str(error).splitlines()[0][:200]})"
        ) from error
    finally:
        if own:
            if not lost:
                gc.collect()  # process groups that only a cycle holds end here, not with the interpreter
            _leave()


def settle() -> None:
    """Waits until every process has come here, so that torchrun, which ends all when one fails,
    cuts none short; without a world or with a peer gone does nothing."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()


def _leave() -> None:
    """Takes the process group down, or it may abort the process at its end. With a peer gone that
    may wait for ever, with the gloo of torch 2.6 even for one that left in peace."""
    if torch.__version__.startswith("2.6.") and dist.get_backend() == "gloo":
        return

    def destroy() -> None:
        with suppress(RuntimeError):
            dist.destroy_process_group()

    leaving = threading.Thread(target=destroy, daemon=True)
    leaving.start()
    leaving.join(_LEAVING_S)


def _meet(device: torch.device, world: World) -> None:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise TxlError(f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}: start the processes by torchrun")
    if not 0 <= world.rank < world.size:
        raise TxlError(f"RANK must be from 0 to WORLD_SIZE - 1 = {world.size - 1}, got {world.rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(_backend(device), timeout=TIMEOUT)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TxlError(
            f"rank {world.rank}: the {world.size} processes cannot meet at {where}: {str(error).splitlines()[0][:300]}"
        ) from error


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        got = os.environ.get(name)
        raise TxlError(f"the environment's {name} must be a whole number, as torchrun sets it, got {got!r}") from None


def _is_lost_peer(error: RuntimeError) -> bool:
    if isinstance(error, (dist.DistError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return any(word in text for word in _LOST)
