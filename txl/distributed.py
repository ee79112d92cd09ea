"""Data-parallel training processes started by torchrun: setup, exchange, comparison, shutdown."""

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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


class SharedError(TxlError):
    """An error of one process, raised in all of them so that none waits for ever.

    Attributes:
        rank: the rank of the process whose error it is.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class World:
    """The process group as seen by this process; `World()` is a single process.

    All processes must call each method, in the same order.

    Attributes:
        rank: from 0 to size - 1.
        size: the number of processes.
    """

    rank: int = 0
    size: int = 1

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
        small.

        Raises:
            SharedError: another process arrived here with an error raised inside `together`.
        """
        return self._exchange(value, None)

    def _exchange(self, value: Any, error: str | None) -> list[Any]:
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (value, error))
        for rank, (_, message) in enumerate(found):
            if message is not None:
                raise SharedError(message if rank == 0 else f"rank {rank}: {message}", rank)
        return [given for given, _ in found]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, on the CPU and in order of the ranks, to the first
        process, and an empty list to the others. All have the same shape and dtype."""
        if self.size == 1:
            return [tensor.cpu()]
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.first else None
        dist.gather(tensor, found)
        return [x.cpu() for x in found or ()]

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context whose body succeeds in all processes or raises in all.

        The body may use no collective but `gather` and the methods built on it.

        Raises:
            SharedError: a process raised TxlError or OSError; the message is that of the lowest
                such rank.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except SharedError:
            raise
        except (TxlError, OSError) as error:
            self._exchange(None, str(error))
        else:
            self._exchange(None, None)

    def first_does(self, act: Callable[[], _T]) -> _T:
        """Call `act` in the first process and return its result in all of them. The result is
        pickled, so keep it small. Errors as in `together`."""
        result: list[_T] = []
        with self.together():
            if self.first:
                result.append(act())
        return self.gather(result)[0][0]

    def agree(self, facts: dict[str, str]) -> None:
        """Check that `facts` are equal in all processes.

        Raises:
            SharedError: a fact differs; the message names it and gives both values.
        """
        told = self.gather(facts)
        with self.together():
            for rank, theirs in enumerate(told):
                for name, mine in told[0].items():
                    if theirs.get(name) != mine:
                        raise TxlError(
                            f"the processes differ in {name}: rank 0 has {mine}, rank {rank} has {theirs.get(name)}"
                        )


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
        TxlError: the processes cannot connect (a port in use, a process that does not arrive), or
            another process is lost later.
    """
    if not launched():
        yield World()
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
                gc.collect()  # frees process groups that only a reference cycle still holds
            _leave()


def settle() -> None:
    """Wait for all processes at a barrier, so that torchrun, which kills all when one fails, kills
    none that is still working. Does nothing without a process group or when a process is lost."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()


def _leave() -> None:
    """Destroy the process group, since it may otherwise abort the process at exit. The call can
    block for ever when a process is lost, so it runs in a thread that is joined for `_LEAVING_S`
    seconds; with gloo in torch 2.6 it can block even after a clean exit and is skipped."""
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
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TxlError(
            f"rank {world.rank}: the {world.size} processes cannot meet at {where}: {str(error).splitlines()[0][:300]}"
        ) from error


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


def agree_on(world: World, corpus: str, model: dict[str, Any], train: dict[str, Any]) -> None:
    """Check that code, corpus (its fingerprint) and configurations are equal in all processes.

    Raises:
        SharedError: something differs; the message names it.
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
