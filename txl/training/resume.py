"""What a checkpoint of a run holds beside its parameters, and how the run goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from txl.errors import TxlError
from txl.training import checkpoint as checkpoints
from txl.training import log
from txl.training.run_folder import CHANGEABLE, refuse_changes

if TYPE_CHECKING:
    from txl.training.trainer import Trainer


def everything(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State (JSON) and tensors that a bit-exact continuation needs."""
    extra: dict[str, Tensor] = {"rng.cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        extra["rng.cuda"] = torch.cuda.get_rng_state(trainer.device)
    for n, optimizer in enumerate(trainer.optimizers):
        for i, slots in optimizer.state_dict()["state"].items():
            extra |= {f"optimizer.{n}.{i}.{name}": torch.as_tensor(x) for name, x in slots.items()}
    for chunk, memory in enumerate(trainer.memories):
        for i, x in enumerate(memory or ()):
            extra[f"memory.{chunk}.{i}"] = x
    extra |= trainer.average.tensors()
    state: dict[str, Any] = {"step": trainer.step, "best_loss": trainer.best_loss, "train": trainer.config.to_json()}
    state |= {"corpus": trainer.corpus.fingerprint, "attn_len": trainer.attn_len, "segment": trainer.segment}
    state |= {"validation_due": trainer.validation_due}
    state |= {"losses": trainer.average.losses, "averaging": trainer.average.started}
    return state, extra


def restore(trainer: Trainer) -> None:
    """Takes up a run at its last checkpoint.

    Raises:
        TxlError: there is none, or it is of other options or of another text.
    """
    saved = checkpoints.load(trainer.last)
    if "train" not in saved.state:
        raise TxlError(f"{trainer.last}: holds parameters only (a best checkpoint?); it cannot be resumed")
    try:
        _refuse_others(trainer, saved)
        _take_up(trainer, saved)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise TxlError(f"{trainer.last}: the checkpoint is damaged: {type(error).__name__}: {error}") from error
    log.truncate(trainer.folder / "log.jsonl", trainer.step, not trainer.validation_due)


def _refuse_others(trainer: Trainer, saved: checkpoints.Checkpoint) -> None:
    """Raises TxlError where the run was of other options or another text."""
    refuse_changes(trainer.folder, "model", saved.config.to_json(), trainer.model.config.to_json())
    refuse_changes(trainer.folder, "training", saved.state["train"], trainer.config.to_json(), CHANGEABLE)
    if saved.state["corpus"] != trainer.corpus.fingerprint:
        raise TxlError(
            f"{trainer.folder}: cannot resume on another text: {trainer.corpus.folder} is not what it was trained on"
        )
    if trainer.config.steps < saved.state["step"]:
        raise TxlError(
            f"{trainer.folder}: steps is {trainer.config.steps}, but {saved.state['step']} updates are done already"
        )


def _take_up(trainer: Trainer, saved: checkpoints.Checkpoint) -> None:
    checkpoints.load_parameters(trainer.model, saved)
    for n, optimizer in enumerate(trainer.optimizers):
        state = optimizer.state_dict()
        state["state"] = {}
        for name, x in saved.part(f"optimizer.{n}").items():
            i, key = name.split(".", 1)
            state["state"].setdefault(int(i), {})[key] = x
        optimizer.load_state_dict(state)
    for chunk in range(len(trainer.memories)):
        memory = saved.part(f"memory.{chunk}")
        trainer.memories[chunk] = tuple(memory[str(i)].to(trainer.device) for i in range(len(memory))) or None
    if trainer.config.average != "none":
        kept = saved.part("average")
        trainer.average.restore(kept, saved.tensors["average_count"], saved.state["losses"], saved.state["averaging"])
    trainer.step, trainer.best_loss = saved.state["step"], saved.state["best_loss"]
    trainer.validation_due = bool(saved.state["validation_due"])
    rng = saved.part("rng")
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"], trainer.device)
