"""What a checkpoint of a run holds beside its parameters, and how the run goes on from it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from txl.distributed.world import World
from txl.errors import TxlError
from txl.model.transformer import HiddenMemory
from txl.training import log
from txl.training.checkpoint import check_shapes
from txl.training.config import TrainConfig
from txl.training.run_folder import CHANGEABLE, refuse_changes
from txl.training.saved import Saved

if TYPE_CHECKING:
    from txl.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """What JSON holds of a run."""
    average = trainer.updater.average
    state: dict[str, Any] = {"step": trainer.step, "best_loss": trainer.best_loss, "train": trainer.config.to_json()}
    state |= {"corpus": trainer.corpus.fingerprint, "attn_len": trainer.attn_len, "segment": trainer.segment}
    state |= {"validation_due": trainer.validation_due, "ranks": trainer.world.size}
    return state | {"losses": average.losses, "averaging": average.started}


def tensors_of(trainer: Trainer, gathered: bool) -> dict[str, Tensor]:
    """What a continuation needs beside the network's parameters: optimizers, average, memory of
    each part of the batch, random numbers of each process.

    gathered: for the first process of all processes, by all of them; else this one's part.
    """
    extra: dict[str, Tensor] = {}
    for n, optimizer in enumerate(trainer.updater.optimizers):
        for i, slots in optimizer.state_dict()["state"].items():
            extra |= {f"optimizer.{n}.{i}.{name}": torch.as_tensor(x) for name, x in slots.items()}
    extra |= trainer.updater.average.tensors()
    world, memories = trainer.world, trainer.batches.memories
    for chunk, memory in enumerate(memories):
        for i, x in enumerate(memory or ()):
            found = world.gather_tensors(x) if gathered else [x.contiguous()]
            for rank, part in enumerate(found, 0 if gathered else world.rank):
                extra[f"memory.{rank * len(memories) + chunk}.{i}"] = part
    own = {f"{_rng(world.rank)}.cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        own[f"{_rng(world.rank)}.cuda"] = torch.cuda.get_rng_state(trainer.device)
    for one in world.gather(own) if gathered else [own]:
        extra |= one
    return extra


def seed_anew(config: TrainConfig, step: int, world: World) -> None:
    """Begins this process's random numbers, which are no other's."""
    given = f"{config.seed} {step} {world.rank} {world.size}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(given).digest()[:7], "little"))


_DAMAGED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


def check(trainer: Trainer, saved: Saved) -> None:
    """Raises TxlError where the run was of other options or another text."""
    if "train" not in saved.state:
        raise TxlError(f"{saved.path}: holds parameters only (a best checkpoint?); it cannot be resumed")
    try:
        _refuse_others(trainer, saved)
    except _DAMAGED as error:
        raise _damaged(saved, error) from error


def restore(trainer: Trainer, saved: Saved) -> None:
    """Takes up a run at a checkpoint that `check` has let through; by all processes.

    Raises:
        TxlError: it is damaged.
    """
    try:
        _take_up(trainer, saved)
    except _DAMAGED as error:
        raise _damaged(saved, error) from error
    if trainer.world.first:
        log.truncate(trainer.folder / "log.jsonl", trainer.step, not trainer.validation_due)


def _damaged(saved: Saved, error: Exception) -> TxlError:
    return TxlError(f"{saved.path}: the checkpoint is damaged: {type(error).__name__}: {error}")


def _refuse_others(trainer: Trainer, saved: Saved) -> None:
    try:
        before = TrainConfig.from_json(saved.state["train"]).to_json()  # with the options that came later
    except TxlError as error:
        raise TxlError(f"{saved.path}: the checkpoint is damaged: {error}") from error
    refuse_changes(trainer.folder, "model", saved.config.to_json(), trainer.model.config.to_json())
    refuse_changes(trainer.folder, "training", before, trainer.config.to_json(), CHANGEABLE)
    if saved.state["corpus"] != trainer.corpus.fingerprint:
        raise TxlError(
            f"{trainer.folder}: cannot resume on another text: {trainer.corpus.folder} is not what it was trained on"
        )
    if trainer.config.steps < saved.state["step"]:
        raise TxlError(
            f"{trainer.folder}: steps is {trainer.config.steps}, but {saved.state['step']} updates are done already"
        )


def _take_up(trainer: Trainer, saved: Saved) -> None:
    updater, world = trainer.updater, trainer.world
    parameters = dict(trainer.model.named_parameters())
    check_shapes(saved.path, {name: saved.sizes[f"model.{name}"][0] for name in saved.under("model")}, parameters)
    targets: dict[str, Tensor] = {f"model.{name}": p for name, p in parameters.items()}
    slots = [_slots(saved, n, optimizer) for n, optimizer in enumerate(updater.optimizers)]
    for n, of_optimizer in enumerate(slots):
        for i, named in of_optimizer.items():
            targets |= {f"optimizer.{n}.{i}.{name}": x for name, x in named.items()}
    if trainer.config.average != "none":
        targets |= updater.average.tensors()
        updater.average.losses, updater.average.started = list(saved.state["losses"]), saved.state["averaging"]
    saved.fill(targets)
    for optimizer, state in zip(updater.optimizers, slots, strict=True):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    trainer.batches.restore(_memory(saved, trainer.batches.rows, trainer.config.batch))
    trainer.step, trainer.best_loss = saved.state["step"], saved.state["best_loss"]
    trainer.validation_due = bool(saved.state["validation_due"])
    if saved.state.get("ranks", 1) == world.size:
        (cpu,) = saved.read(f"{_rng(world.rank)}.cpu")
        torch.set_rng_state(cpu)
        cuda = f"{_rng(world.rank)}.cuda"
        if cuda in saved.sizes and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(saved.read(cuda)[0], trainer.device)
    else:
        seed_anew(trainer.config, trainer.step, world)


def _slots(saved: Saved, n: int, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """Empty tensors for the state of an optimizer, sharded as the parameters they belong to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[int, dict[str, Tensor]] = {}
    for name in saved.under(f"optimizer.{n}"):
        i, slot = name.split(".", 1)
        shape, dtype = saved.sizes[f"optimizer.{n}.{name}"]
        like = parameters[int(i)].detach()
        fresh = torch.empty_like(like, dtype=dtype) if shape == like.shape else torch.empty(shape, dtype=dtype)
        found.setdefault(int(i), {})[slot] = fresh
    return found


def _memory(saved: Saved, rows: slice, batch: int) -> HiddenMemory | None:
    """The memory of some rows of the batch, whoever held which part of it; None if there is
    none."""
    parts: dict[int, int] = {}
    for name in saved.under("memory"):
        part, layer = (int(x) for x in name.split("."))
        parts[part] = max(parts.get(part, 0), layer + 1)
    if not parts:
        return None
    begin, found = 0, []
    for part, layers in sorted(parts.items()):
        end = begin + saved.sizes[f"memory.{part}.0"][0][0]
        if begin < rows.stop and rows.start < end:
            held = slice(max(rows.start - begin, 0), rows.stop - begin)
            found.append([x[held] for x in saved.read(*(f"memory.{part}.{i}" for i in range(layers)))])
        begin = end
    if begin != batch:
        raise ValueError(f"memory of {begin} streams, not of {batch}")
    return tuple(torch.cat(layer) for layer in zip(*found, strict=True))


def _rng(rank: int) -> str:
    return "rng" if rank == 0 else f"rng.{rank}"
