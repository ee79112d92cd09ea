"""How a training is shown, whichever command it is part of."""

from txl.commands.console import TrainingProgress
from txl.commands.interrupt import stop_on_ctrl_c, tell_saved
from txl.commands.options import console
from txl.distributed.world import World
from txl.pictures import missing
from txl.report import loss_curve
from txl.training.trainer import Interrupted, Trainer


def run_training(trainer: Trainer, kept: list[str]) -> None:
    """Trains to the end, or to a Ctrl-C, after which the way on is told and the loss drawn.

    kept: options that are to be given again on resume.
    """
    try:
        with TrainingProgress(console, trainer) as progress, stop_on_ctrl_c(trainer):
            trainer.run(progress.report)
    except Interrupted:
        if trainer.world.first:
            tell_saved(trainer, kept)
            draw_loss(trainer)
        raise


def draw_loss(trainer: Trainer) -> str | None:
    """Draws `loss.png` into the run's folder; returns why it could not, or None."""
    reason = missing()
    if reason is not None:
        return reason
    bytewise = trainer.corpus.vocabulary.unit == "bytes"
    try:
        loss_curve(trainer.folder / "log.jsonl", trainer.folder / "loss.png", bytewise)
    except OSError as error:  # a full disk: the run is there without
        return str(error)
    return None


def restated(device: str, tensorboard: bool = False, shard: bool = False, world: World = World()) -> list[str]:  # noqa: B008 - frozen
    """Options that a run's folder does not keep, where they are not the default."""
    kept = ["--device", device] if device != "auto" else []
    kept += ["--devices", str(world.size)] if world.size > 1 else []
    return kept + (["--shard"] if shard else []) + (["--tensorboard"] if tensorboard else [])
