"""Data-parallel training processes started by torchrun: setup, exchange, comparison, shutdown."""

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

import txl_kernels
from txl.errors import TxlError
from txl_kernels.backends.source_hash import hash_files

_T = TypeVar("_T")
# Timeout of a collective: a process that stays away for longer counts as lost, while one that dies
# is noticed at once. The first process validates alone, so a validation must take less.
TIMEOUT = timedelta(minutes=60)
_LEAVING_S = 10.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOST = ("connection closed by peer", "connection reset", "broken pipe", "timed out", "timeout", "nccl", "gloo")


@dataclass(frozen=True)
class World:
    """The process group as seen by this process; `World()` is a single process.

    All processes must call each method, in the same order.

    Attributes:
        rank: from 0 to size - 1.
        size: the number of processes.
        store: the key-value store of torchrun, or of rank 0 without torchrun; None if this process
            group was not made by `joined`.
    """

    rank: int = 0
    size: int = 1
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the only process that writes files and prints."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """Return this process's slice of `count` rows: contiguous, in order of the ranks, with
        sizes that differ by at most one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all processes, in order of the ranks. They are pickled, so keep them
        small."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, on the CPU and in order of the ranks, to the first
        process, and an empty list to the others. All have the same shape and dtype."""
        if self.size == 1:
            return [tensor.cpu()]
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.first else None
        dist.gather(tensor, found)
        return [x.cpu() for x in found or ()]

    def first_does(self, act: Callable[[], _T]) -> _T:
        """Call `act` in the first process and return its result in all of them. The result is
        pickled, so keep it small.

        If it raises, the first process ends, and the others with it (see `lost_peer`). It is
        called where processes meet on the CPU before they meet on GPUs, whose collectives notice
        the end of a process only after `TIMEOUT`.
        """
        result: list[Any] = [act() if self.first else None]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        given: _T = result[0]
        return given

    def agree(self, facts: dict[str, str]) -> None:
        """Check that `facts` are equal in all processes.

        Raises:
            TxlError: in all processes: a fact differs; the message names it and gives both values.
        """
        gathered = self.gather(facts)
        for rank, theirs in enumerate(gathered):
            for name, mine in gathered[0].items():
                if theirs.get(name) != mine:
                    raise TxlError(
                        f"the processes differ in {name}: rank 0 has {mine}, rank {rank} has {theirs.get(name)}"
                    )

    def is_first_to_fail(self) -> bool:
        """Whether no other process has called this before: of those that fail, the first reports
        its error. Unlike the other methods, any process may call it."""
        try:
            return self.store is None or self.store.add("txl.failed", 1) == 1
        except RuntimeError:  # the store has ended with its process
            return True


def launched() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_device(name: str) -> str:
    """Resolve a device name: under torchrun "cuda" is this process's GPU, and so is "auto" if there
    are GPUs.

    Raises:
        TxlError: this machine has fewer GPUs than processes, or the name gives one GPU to all of
            them.
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
def joined(device: torch.device) -> Iterator[World]:
    """A context with the world that torchrun started, or a single process without torchrun.

    An existing default process group is used and not destroyed.

    device: of this process; CPU tensors are exchanged by gloo, CUDA tensors by NCCL.

    Raises:
        TxlError: the processes cannot connect (a port in use, a process that does not arrive).
    """
    if not launched():
        yield World()
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if dist.is_initialized():
        yield World(rank, size)
        return
    store = _meet(device, rank, size)
    try:
        yield World(rank, size, store)
    finally:
        _leave()


def settle() -> None:
    """Wait for all processes at a barrier, so that torchrun, which kills all when one fails, kills
    none that is still working. Does nothing without a process group or when a process is lost."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()


def _leave() -> None:
    """Destroy the process group, since it may otherwise abort the process at exit. This can block
    for ever when a process is lost, so it runs in a thread that is joined for `_LEAVING_S` seconds;
    with gloo in torch 2.6 it can block even after a clean exit and is skipped."""

    def destroy() -> None:
        gc.collect()  # frees process groups that only a reference cycle still holds
        if not torch.__version__.startswith("2.6.") or dist.get_backend() != "gloo":
            with suppress(RuntimeError):
                dist.destroy_process_group()

    leaving = threading.Thread(target=destroy, daemon=True)
    leaving.start()
    leaving.join(_LEAVING_S)


def _meet(device: torch.device, rank: int, size: int) -> Any:
    """Make the default process group of `size` processes; return its store."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise TxlError(f"RANK and WORLD_SIZE are set, but not {', '.join(missing)}: start the processes by torchrun")
    if not 0 <= rank < size:
        raise TxlError(f"RANK must be from 0 to WORLD_SIZE - 1 = {size - 1}, got {rank}")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store = next(rendezvous("env://", timeout=TIMEOUT))[0]
        dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
        dist.barrier()
        return store
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TxlError(
            f"rank {rank}: the {size} processes cannot meet at {where}: {str(error).splitlines()[0][:300]}"
        ) from error


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        got = os.environ.get(name)
        raise TxlError(f"the environment's {name} must be a whole number, as torchrun sets it, got {got!r}") from None


def lost_peer(error: Exception) -> str | None:
    """Return a message in one line if an error means that another process has ended, else None."""
    text = str(error)
    ended = isinstance(error, (dist.DistError, dist.DistBackendError, dist.DistNetworkError))
    if not ended and not (isinstance(error, RuntimeError) and any(word in text.lower() for word in _LOST)):
        return None
    return (
        "another process has ended or does not answer, so this one ends, too; what was saved is kept, --resume goes on "
        f"from it ({text.splitlines()[0][:200]})"
    )


def agree_on(world: World, corpus: str, model: dict[str, Any], train: dict[str, Any]) -> None:
    """Check that code, corpus (its fingerprint) and configurations are equal in all processes.

    Raises:
        TxlError: something differs; the message names it.
    """
    if world.size == 1:
        return
    facts = {"torch": torch.__version__, "the code of txl": code_digest(), "the corpus": corpus[:16]}
    facts |= {f"the model's {name}": json.dumps(value) for name, value in model.items()}
    facts |= {f"training's {name}": json.dumps(value) for name, value in train.items()}
    world.agree(facts)


@cache
def code_digest() -> str:
    """Hashes of the Python source files of both packages, whatever their version numbers are."""
    roots = (Path(__file__).parent, Path(str(txl_kernels.__file__)).parent)
    return ", ".join(hash_files(root, root.rglob("*.py")) for root in roots)
