"""What a few updates tell before a run: how many fill a time, which precision is faster."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from txl.distributed import SharedError, World
from txl.model.config import Config
from txl.precision import faster, may_help
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer
from txl.training.update import NotFinite

_UNTIMED, _TIMED = 4, 16  # updates of a trial
_PREPARING = 2  # updates before a precision is timed: one without memory and one with it


def timed(
    minutes: float, corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
    shard: bool = False,
) -> TrainConfig:  # fmt: skip
    """The configuration with as many updates as fill the time, evaluated and saved four times;
    warm-up is a thirtieth of them at most. Judged by a trial of a few updates; a `Trainer.run` that
    is given the seconds, too, follows the clock from there."""
    with _trial(corpus, model, config, device, world, shard) as trial:
        trial.advance(_UNTIMED)
        seconds = _seconds(trial, _TIMED, world)
    steps = max(int(minutes * 60 / seconds), 1)
    every = -(-steps // 4)
    warmup = config.warmup if config.warmup is None else min(config.warmup, steps // 30)
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every, save_every=every)


def with_precision(
    corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
    shard: bool = False,
) -> tuple[TrainConfig, str | None]:  # fmt: skip
    """The configuration with "auto" decided where CPUs multiply bfloat16, and what was measured, in
    words; else as it was and None.

    Updates of two trial runs, in turns; bfloat16 is taken where the median is `FASTER`. A trial is
    no longer than the run, and one that fails ends in float32. The configuration holds the
    decision, so a run that goes on keeps it. Several processes decide alike, by the times of the
    slowest; where one of them has no such CPU, none tries.
    """
    asked = world.gather((config.precision, may_help(device)))
    if any(one != ("auto", True) for one in asked):  # options that differ are the trainer's to refuse
        return config, None
    both = {name: dataclasses.replace(config, precision=name) for name in ("fp32", "bf16")}
    most = config.steps - _PREPARING
    if most < 1:
        return both["fp32"], f"precision: fp32 (a run of {config.steps} updates is too short to measure bf16)"
    try:
        with contextlib.ExitStack() as stack:
            trials = {n: stack.enter_context(_trial(corpus, model, c, device, world, shard)) for n, c in both.items()}
            for trial in trials.values():
                trial.advance(_PREPARING)
            name, words = faster(lambda name: _seconds(trials[name], 1, world), "an update", most)
    except SharedError as error:  # of all processes
        if not isinstance(error.__cause__, NotFinite):
            raise
        return both["fp32"], f"precision: fp32 (in a trial of both {error.__cause__})"
    return both[name], words


@contextlib.contextmanager
def _trial(
    corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World, shard: bool
) -> Iterator[Trainer]:
    """A run in a folder that goes with it; torch's generators are then as they were before."""
    folder = Path(tempfile.mkdtemp(prefix="txl-trial-"))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield Trainer(folder, corpus, model, config, device=device, world=world, shard=shard)
    finally:
        shutil.rmtree(folder)


def _seconds(trial: Trainer, updates: int, world: World) -> float:
    """Of an update, in the slowest of the processes."""
    began = time.perf_counter()
    trial.advance(updates)
    return max(world.gather((time.perf_counter() - began) / updates))
