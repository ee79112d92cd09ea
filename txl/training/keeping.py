"""The checkpoint a run goes on from, written and read as the run is: in one file, or in shards."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from txl.errors import TxlError
from txl.training import checkpoint as checkpoints
from txl.training import resume
from txl.training.last import WHOLE, find_last, remove_older, shards_folder
from txl.training.saved import Saved
from txl.training.shards import begin_save, end_save, open_shards

if TYPE_CHECKING:
    from concurrent.futures import Future

    from txl.training.trainer import Trainer


class Keeper:
    """Saves and restores a run; every method by all processes.

    Attributes:
        has_saved: whether there is a checkpoint of this run.
    """

    def __init__(self, trainer: Trainer, shard: bool) -> None:
        # Not the trainer itself: one that nobody holds goes at once, with its model.
        self._trainer: Trainer = weakref.proxy(trainer)
        self._shard = shard
        self._writing: tuple[Path, Future[Any]] | None = None
        self._group: Any = None
        self.has_saved = False
        if shard:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo")  # its own: training talks meanwhile

    @property
    def last(self) -> Path:
        """The newest checkpoint, or where it will be."""
        return find_last(self._trainer.folder) or self._trainer.folder / WHOLE

    def saved_step(self) -> int | None:
        """Of the newest checkpoint; None without one."""
        if not self.has_saved:
            return None
        self._wait()
        return int(self._open().state["step"])

    def save(self, wait: bool) -> None:
        """Raises TxlError if this checkpoint cannot be written, or the one before could not."""
        trainer = self._trainer
        self._wait()
        state = resume.state_of(trainer)
        if self._shard:
            tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in trainer.model.named_parameters()}
            tensors |= resume.tensors_of(trainer, gathered=False)
            folder = trainer.world.first_does(lambda: shards_folder(trainer.folder, trainer.step))
            begun = begin_save(folder, trainer.model.config, trainer.corpus.vocabulary, state, tensors, self._group)
            self._writing = folder, begun
            if wait:
                self._wait()
        else:
            extra = resume.tensors_of(trainer, gathered=True)
            with trainer.world.together():
                if trainer.world.first:
                    path = trainer.folder / WHOLE
                    checkpoints.save(path, trainer.model, trainer.corpus.vocabulary, state, extra)
                    remove_older(path)
        self.has_saved = True

    def restore(self) -> None:
        """Takes up the run at its newest checkpoint.

        Raises:
            TxlError: there is none, or it is damaged, or of other options or another text.
        """
        world = self._trainer.world
        with world.together():
            saved = self._open(True)
            resume.check(self._trainer, saved)
        world.agree({"the checkpoint to resume from": f"{saved.path.name}, {saved.digest[:16]}"})
        resume.restore(self._trainer, saved)
        self.has_saved = True

    def _open(self, verify: bool = False) -> Saved:
        path, world = self.last, self._trainer.world
        if not path.is_dir():
            return checkpoints.load(path)
        # Each process reads some of the files to the end.
        return open_shards(path, range(world.rank, 1 << 20, world.size) if verify else range(0))

    def _wait(self) -> None:
        if self._writing is None:
            return
        (folder, begun), self._writing = self._writing, None
        with self._trainer.world.together():
            try:
                end_save(folder, begun)
            except TxlError:
                self.has_saved = find_last(folder.parent) is not None
                raise
