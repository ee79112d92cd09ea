"""The processes that work together, and how they agree."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from txl.errors import TxlError

_T = TypeVar("_T")


class SharedError(TxlError):
    """An error of one process that all of them raise, so that none waits for another for ever.

    Attributes:
        rank: of the process whose error it is.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class World:
    """This process among all that work together; `World()` is alone.

    Every method is to be called by all processes alike.

    Attributes:
        rank: from 0 to size - 1. size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def rows(self, count: int) -> slice:
        """This process's share of `count` rows: contiguous, in order of the ranks, of sizes that
        differ by one at most."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, element by element; a new tensor."""
        summed = values.clone()
        if self.size > 1:
            dist.all_reduce(summed)
        return summed

    def gather(self, value: _T) -> list[_T]:
        """What each process gives, in order of the ranks; anything small that can be pickled.

        Raises:
            SharedError: a process came here with an error, from inside `together`.
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
        """For the first process each one's tensor, of one shape, on the CPU; for the others
        nothing."""
        if self.size == 1:
            return [tensor.cpu()]
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.first else None
        dist.gather(tensor, found)
        return [x.cpu() for x in found or ()]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done here either succeeds in all processes or raises in all.

        Of what talks between processes only `gather` and what is made of it may be inside.

        Raises:
            SharedError: a process raised TxlError or OSError; its message, of the lowest rank.
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
        """What the first process computes, in all; small and picklable. Errors as in `together`."""
        result: list[_T] = []
        with self.together():
            if self.first:
                result.append(act())
        return self.gather(result)[0][0]

    def in_order(self, act: Callable[[], _T]) -> _T:
        """The first process acts, then all others: for what only the first has to make.

        Errors as in `together`.
        """
        result: list[_T] = []
        for turn in (True, False):
            with self.together():
                if self.first is turn:
                    result.append(act())
        return result[0]

    def agree(self, facts: dict[str, str]) -> None:
        """Compares what must be the same in all processes.

        Raises:
            SharedError: a fact differs; it is named, with both values.
        """
        told = self.gather(facts)
        with self.together():
            for rank, theirs in enumerate(told):
                for name, mine in told[0].items():
                    if theirs.get(name) != mine:
                        raise TxlError(
                            f"the processes differ in {name}: rank 0 has {mine}, rank {rank} has {theirs.get(name)}"
                        )
