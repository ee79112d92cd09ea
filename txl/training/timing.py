"""What a few updates tell before a run: how many fill a time, which precision is faster."""

import contextlib
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from txl.distributed.world import World
from txl.model.networks import Config
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.precision import FASTER, may_help
from txl.training.trainer import Trainer

_UNTIMED, _TIMED = 4, 16  # updates of a trial
_ROUNDS, _ROUND = 3, 2  # of a trial in either precision: rounds in turns, updates of a round


def timed(
    minutes: float, corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
    shard: bool = False,
) -> TrainConfig:  # fmt: skip
    """The configuration with as many updates as fill the time, evaluated and saved four times;
    warm-up is a thirtieth of them at most. Judged by a trial of a few updates."""
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
    """The configuration with "auto" decided where a CPU multiplies bfloat16, and what was measured,
    in words; else as it was and None.

    A few updates of trial runs in either precision, in turns; bfloat16 is taken where the median is
    `FASTER`. The configuration holds the decision, so a run that goes on keeps it.
    """
    if config.precision != "auto" or not may_help(device):
        return config, None
    both = [dataclasses.replace(config, precision=x) for x in ("fp32", "bf16")]
    with contextlib.ExitStack() as stack:
        trials = [stack.enter_context(_trial(corpus, model, x, device, world, shard)) for x in both]
        for trial in trials:
            trial.advance(1)
        rounds = [[_seconds(trial, _ROUND, world) for trial in trials] for _ in range(_ROUNDS)]
    single, half = (statistics.median(column) for column in zip(*rounds, strict=True))
    chosen = both[single >= FASTER * half]
    return chosen, f"precision: {chosen.precision} (an update takes {single:.3g} s in fp32, {half:.3g} s in bf16)"


@contextlib.contextmanager
def _trial(
    corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World, shard: bool
) -> Iterator[Trainer]:
    """A run in a folder that goes with it. Whoever trains next seeds torch's generator anew."""
    folder = Path(tempfile.mkdtemp(prefix="txl-trial-"))
    try:
        yield Trainer(folder, corpus, model, config, device=device, world=world, shard=shard)
    finally:
        shutil.rmtree(folder)


def _seconds(trial: Trainer, updates: int, world: World) -> float:
    """Of an update, in the slowest of the processes."""
    began = time.perf_counter()
    trial.advance(updates)
    return max(world.gather((time.perf_counter() - began) / updates))
