"""The number of updates that fit a time, from a short trial."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch

from txl.distributed import World
from txl.model.config import Config
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

_UNTIMED, _TIMED = 4, 16  # updates of a trial before and during the measurement


def timed(
    minutes: float, corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
) -> TrainConfig:  # fmt: skip
    """Return the configuration with the number of updates that fit into `minutes`, four evaluations
    and checkpoints, and a warm-up of at most a thirtieth of the updates. The number is estimated
    from a few updates; `Trainer.run` corrects it during training if it is given the time as
    well."""
    with _trial(corpus, model, config, device, world) as trial:
        trial.advance(_UNTIMED)
        seconds = _seconds(trial, _TIMED, world)
    steps = max(int(minutes * 60 / seconds), 1)
    every = -(-steps // 4)
    warmup = config.warmup if config.warmup is None else min(config.warmup, steps // 30)
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every, save_every=every)


@contextlib.contextmanager
def _trial(corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World) -> Iterator[Trainer]:
    """A context with a trainer that writes no files; afterwards torch's random generators are
    restored."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield Trainer(None, corpus, model, config, device=device, world=world)


def _seconds(trial: Trainer, updates: int, world: World) -> float:
    """Return the seconds an update takes in the slowest process."""
    began = time.perf_counter()
    trial.advance(updates)
    return max(world.gather((time.perf_counter() - began) / updates))
