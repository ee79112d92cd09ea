"""What the processes exchange in an update: counted payloads, and what of them each one sends."""

from dataclasses import dataclass
from typing import Literal

from txl.recipes.scaling.setup import MASTER, Setup, padded, table_count

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
BUCKET = 25 * 2**20  # bytes that DDP reduces at once (its `bucket_cap_mb`)


@dataclass(frozen=True)
class Collective:
    """One that all processes take part in.

    Attributes:
        payload: bytes of the whole tensor that is reduced, gathered or scattered.
        times: in an update.
        late: whether nothing is left to compute while it runs, or nothing can begin before it ends.
    """

    kind: Kind
    payload: int
    times: int
    late: bool = False

    def sent(self, processes: int) -> float:
        """Bytes a process sends, and receives, in all `times`; no algorithm needs fewer."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (processes - 1) / processes * self.payload * self.times


def collectives(setup: Setup) -> list[Collective]:
    """Of one update; without sums of a few numbers (loss, norm)."""
    if setup.processes == 1:
        return []
    return _sharded(setup) if setup.shard else _replicated(setup)


def sent(setup: Setup) -> float:
    """Bytes a process sends an update."""
    return sum(each.sent(setup.processes) for each in collectives(setup))


def _replicated(setup: Setup) -> list[Collective]:
    """One float32 sum of every gradient, the first and last layers' tables at the very end: they
    are the softmax's, too, or the first that forward uses."""
    late = MASTER * table_count(setup.model)
    early = MASTER * setup.parameters.count - late
    return [Collective("all_reduce", early, 1), Collective("all_reduce", late, 1, late=True)]


def _sharded(setup: Setup) -> list[Collective]:
    """For every chunk: the root is gathered once, a layer for forward and again for backward; each
    gradient is scattered. The root's come first and last."""
    p, n, chunks = setup.parameters, setup.processes, setup.backwards
    root, layer = padded(p.root, n), padded(p.layer, n)
    found = [
        Collective("all_gather", setup.width * root, chunks, late=True),
        Collective("reduce_scatter", MASTER * root, chunks, late=True),
    ]
    if p.layers:
        found.append(Collective("all_gather", setup.width * layer, 2 * p.layers * chunks))
        found.append(Collective("reduce_scatter", MASTER * layer, p.layers * chunks))
    return found
