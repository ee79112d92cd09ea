"""Functions that ranks run in tests, and a single process with `World()`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from default_device import default_dtype
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from training_helpers import trainer, unlock

from txl import distributed
from txl.distributed import World
from txl.text import corpus as data
from txl.training.trainer import Trainer
from txl_kernels import RelAttention


class Trained(NamedTuple):
    """Values of each update, and the state at the end; memory [layers][rows, M, d] of this rank's
    rows."""

    losses: list[float]
    norms: list[float]
    memory: list[Tensor]
    parameters: dict[str, Tensor]
    average: dict[str, Tensor]
    step: int


def several(
    world: World, folder: Path, corpus: Path, cases: dict[str, dict[str, Any]], updates: int
) -> dict[str, Trained]:
    """Train each case from its start, in float64."""
    opened, found = data.load(corpus), {}
    with default_dtype(torch.float64):
        for name, case in cases.items():
            t = trainer(folder / name, opened, world=world, **case)
            found[name] = _update(t, updates)
    return found


def go_on(world: World, folder: Path, corpus: Path, until: int, **case: Any) -> Trained:
    """Begin or resume a run and train until step `until`, in float64; write a checkpoint."""
    with default_dtype(torch.float64):
        resume = (folder / "run.json").exists()
        t = trainer(folder, data.load(corpus), world=world, resume=resume, **case)
        result = _update(t, until - t.step)
        t.save()
    unlock(folder)
    return result


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


def start_each(
    world: World, folder: Path, corpora: list[Path], cases: dict[str, list[dict[str, Any]]]
) -> dict[str, str]:
    """Make a trainer for each case, with options by rank; return the error that each raised."""
    found = {}
    for name, options in cases.items():
        own = dict(options[world.rank])
        corpus = data.load(corpora[own.pop("corpus", 0)])
        code = distributed.code_digest
        if own.pop("other_code", False):
            distributed.code_digest = lambda: "another"
        try:
            trainer(folder / name, corpus, world=world, **own)
            found[name] = "nothing was refused"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            distributed.code_digest = code
    return found


def fully_sharded(world: World, x: Tensor, updates: int) -> list[float]:
    """Train `RelAttention`s in a plain loop, sharded by `fully_shard` in several processes.

    x: [B, L, 16], of which each process takes its rows. Return the losses of all rows.
    """
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
