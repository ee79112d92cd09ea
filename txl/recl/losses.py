"""Losses l(c, t) at exact context lengths: each prediction from c tokens and an empty state."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from txl.distributed.world import World
from txl.recl.positions import Plan, Run
from txl.text.corpus import as_tensor
from txl.text.vocabulary import Tokens

BATCH_TOKENS = 8192


class ContextLosses(Protocol):
    """What is measured: anything that gives log-probabilities."""

    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        """-log P(targets[:, i] | tokens[:, :ends[i]]) in nats, float [B, K].

        Nothing before the tokens [B, n] may matter; ends: K increasing lengths, the last one n.
        """


class Losses(NamedTuple):
    """As far as a measurement has come.

    Attributes:
        values: l(c, t) in nats, [C, N] float64; NaN where it is still to be measured.
        batches: done so far. tokens: read so far, of `Plan.cost`.
    """

    values: npt.NDArray[np.float64]
    batches: int
    tokens: int


@dataclass(frozen=True)
class _Work:
    """Runs of one length, and the contexts of each, first .. last, that they measure."""

    runs: list[Run]
    length: int
    last: int

    def steps(self, plan: Plan) -> list[int]:
        """Their lengths."""
        return [self.length] if self.last >= plan.contexts else plan.lengths[self.runs[0].first : self.last + 1]


def measure(
    predict: ContextLosses,
    tokens: Tokens,
    plan: Plan,
    *,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    batch_tokens: int = BATCH_TOKENS,
    begun: Losses | None = None,
    world: World = World(),  # noqa: B008 - frozen
) -> Iterator[Losses]:
    """Measures one model at all positions and contexts of a plan.

    Args:
        tokens: the text, `plan.tokens` of them.
        limit: the longest context the model can use; longer ones have the loss of that
            (`l(c > K) = l(K)`).
        batch_tokens: tokens of the runs that are read side by side.
        begun: what an earlier, interrupted measurement yielded last, with however many processes.
        world: processes that take a batch each at a time, with the same arguments; all have all
            losses, which are those of one process, bit for bit.

    Yields:
        after each batch, or each round of one a process, what is measured so far, the array being
        the same; at last all of it.

    Raises:
        SharedError: TxlError of `predict` in one of several processes.
    """
    if begun is None:
        begun = Losses(np.full((plan.contexts, len(plan.positions())), np.nan), 0, 0)
    done = begun
    rest = islice(_batches(plan, limit, batch_tokens), begun.batches, None)
    while works := list(islice(rest, world.size)):
        with world.together():
            own = works[world.rank : world.rank + 1]
            found = world.gather([_measured(predict, tokens, plan, work, device) for work in own])
        for work, measured in zip(works, chain.from_iterable(found), strict=True):
            _place(done.values, plan, limit, work, measured)
        count = sum(len(work.runs) * work.length for work in works)
        done = Losses(done.values, done.batches + len(works), done.tokens + count)
        yield done
    usable = plan.usable(limit)
    if 0 < usable < plan.contexts and usable * plan.step == limit:
        done.values[usable:] = done.values[usable - 1]
        yield done


def _measured(
    predict: ContextLosses, tokens: Tokens, plan: Plan, work: _Work, device: torch.device | str
) -> npt.NDArray[np.float64]:
    """The losses of a batch, a row a run."""
    block = torch.stack([as_tensor(tokens[run.start : run.start + work.length]) for run in work.runs])
    steps = work.steps(plan)
    places = np.array([[run.start + end for end in steps] for run in work.runs])
    nll = predict(block.to(device), steps, as_tensor(tokens[places]).to(device))
    losses: npt.NDArray[np.float64] = nll.double().cpu().numpy()
    return losses


def _place(
    values: npt.NDArray[np.float64], plan: Plan, limit: int | None, work: _Work, measured: npt.NDArray[np.float64]
) -> None:
    """Writes the losses of a batch where they belong."""
    for run, row in zip(work.runs, measured, strict=True):
        if work.last >= plan.contexts:  # of the limit itself, for all contexts beyond it
            values[plan.usable(limit) :, run.place] = row[0]
        else:
            for n, loss in enumerate(row):
                values[run.first + n, run.place + n] = loss


def _batches(plan: Plan, limit: int | None, batch_tokens: int) -> Iterator[_Work]:
    """Always the same for the same arguments, so that a measurement can go on."""
    usable = plan.usable(limit)
    clipped = [replace(run, length=min(run.length, usable * plan.step)) for run in plan.runs() if run.first < usable]
    clipped.sort(key=lambda run: (-run.length, run.first, run.start))
    for (length, _), group in groupby(clipped, key=lambda run: (run.length, run.first)):
        for runs in _cut(list(group), length, batch_tokens):
            yield _Work(runs, length, length // plan.step - 1)
    if limit is not None and usable < plan.contexts and usable * plan.step != limit:
        alone = [Run(int(t) - limit, limit, usable, n) for n, t in enumerate(plan.positions())]
        for runs in _cut(alone, limit, batch_tokens):
            yield _Work(runs, limit, plan.contexts)


def _cut(runs: list[Run], length: int, batch_tokens: int) -> Iterator[list[Run]]:
    size = max(batch_tokens // length, 1)
    for first in range(0, len(runs), size):
        yield runs[first : first + size]


def finish(steps: Iterator[Losses], watch: Callable[[Losses], None] = lambda done: None) -> Losses:
    """Runs a measurement to its end; `watch` sees each step."""
    for done in steps:
        watch(done)
    return done
