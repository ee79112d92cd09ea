"""What ranks do in the tests of training: the same as one process, when called with `World()`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from training_helpers import trainer

from txl.distributed.world import World
from txl.text import corpus as data
from txl.training.lock import unlock
from txl.training.trainer import Trainer


class Trained(NamedTuple):
    """Of each update, and at the end; memory [layers][rows, M, d] of this rank's rows."""

    losses: list[float]
    norms: list[float]
    memory: list[Tensor]
    parameters: dict[str, Tensor]
    average: dict[str, Tensor]
    step: int


def several(
    world: World, folder: Path, corpus: Path, cases: dict[str, dict[str, Any]], updates: int
) -> dict[str, Trained]:
    """Each case trained from its start, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        opened, found = data.load(corpus), {}
        for name, case in cases.items():
            t = trainer(folder / name, opened, world=world, **case)
            found[name] = _update(t, updates)
        return found
    finally:
        torch.set_default_dtype(before)


def go_on(world: World, folder: Path, corpus: Path, until: int, **case: Any) -> Trained:
    """Takes a run up, or begins it; ends with a checkpoint at `until`, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        resume = (folder / "run.json").exists()
        t = trainer(folder, data.load(corpus), world=world, resume=resume, **case)
        result = _update(t, until - t.step)
        t.save()
        return result
    finally:
        unlock(folder)
        torch.set_default_dtype(before)


def _update(t: Trainer, updates: int) -> Trained:
    losses, norms = [], []
    for _ in range(updates):
        updated = t._update()
        losses.append(updated.loss)
        norms.append(updated.norm)
    kept = [memory or () for memory in t.batches.memories]
    memory = [torch.cat(layer) for layer in zip(*kept, strict=True)]
    whole = t.updater.whole(t.model)
    average = t.updater.average.module
    return Trained(
        losses, norms, memory, _named(whole), {} if average is None else _named(t.updater.whole(average)), t.step
    )  # fmt: skip


def _named(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}
