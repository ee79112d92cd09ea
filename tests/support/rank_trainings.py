"""What ranks do in the tests of training: the same as one process, when called with `World()`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from training_helpers import trainer, unlock

from txl.distributed import World
from txl.text import corpus as data
from txl.training.trainer import Trainer
from txl_kernels import RelAttention


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


def fully_sharded(world: World, x: Tensor, updates: int) -> list[float]:
    """A loop of one's own over `RelAttention`s that `fully_shard` deals out where there are several
    processes; x: [B, L, 16], of which each takes its rows. Losses of all rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(RelAttention(16, 2).to(x.dtype) for _ in range(2)))
    if world.size > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(updates):
        loss = (model(x[world.rows(len(x))]) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(world.gather(loss.item())) / world.size)
    return losses


def _update(t: Trainer, updates: int) -> Trained:
    losses, norms = [], []
    for _ in range(updates):
        updated = t._update()
        losses.append(updated.loss)
        norms.append(updated.norm)
    kept = [list(memory or ()) for memory in t.batches.memories]
    memory = [torch.cat(layer) for layer in zip(*kept, strict=True)]
    average = t.updater.average.module
    return Trained(losses, norms, memory, _named(t.model), {} if average is None else _named(average), t.step)


def _named(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}
