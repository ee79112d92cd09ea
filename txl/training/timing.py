"""Decisions before a run: how many updates fill a time, by a trial, and its precision."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch

from txl.distributed import World
from txl.model.config import Config
from txl.precision import multiplies_bf16
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

_UNTIMED, _TIMED = 4, 16  # updates of a trial


def timed(
    minutes: float, corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
) -> TrainConfig:  # fmt: skip
    """The configuration with as many updates as fill the time, evaluated and saved four times;
    warm-up is a thirtieth of them at most. Judged by a trial of a few updates; a `Trainer.run` that
    is given the seconds, too, follows the clock from there."""
    with _trial(corpus, model, config, device, world) as trial:
        trial.advance(_UNTIMED)
        seconds = _seconds(trial, _TIMED, world)
    steps = max(int(minutes * 60 / seconds), 1)
    every = -(-steps // 4)
    warmup = config.warmup if config.warmup is None else min(config.warmup, steps // 30)
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every, save_every=every)


def with_precision(config: TrainConfig, device: torch.device, world: World = World()) -> TrainConfig:  # noqa: B008 - frozen
    """The configuration with "auto" decided on a CPU: bf16 where that of every process multiplies
    it faster, else fp32.

    The configuration holds the decision, so a run that goes on keeps it wherever it goes on.
    """
    all_asked = world.gather((config.precision, device.type, multiplies_bf16(device)))
    if any((precision, kind) != ("auto", "cpu") for precision, kind, _ in all_asked):
        return config  # what differs is the trainer's to refuse
    return dataclasses.replace(config, precision="bf16" if all(helps for *_, helps in all_asked) else "fp32")


@contextlib.contextmanager
def _trial(corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World) -> Iterator[Trainer]:
    """A trainer that writes nothing; torch's generators are then as they were before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield Trainer(None, corpus, model, config, device=device, world=world)


def _seconds(trial: Trainer, updates: int, world: World) -> float:
    """The seconds of an update, in the slowest of the processes."""
    began = time.perf_counter()
    trial.advance(updates)
    return max(world.gather((time.perf_counter() - began) / updates))
