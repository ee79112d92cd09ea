"""How many updates fill a time."""

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path

import torch

from txl.distributed.world import World
from txl.model.networks import Config
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

_UNTIMED, _TIMED = 4, 16  # updates of a trial


def timed(
    minutes: float, corpus: Corpus, model: Config, config: TrainConfig, device: torch.device, world: World = World(),  # noqa: B008 - frozen
    shard: bool = False,
) -> TrainConfig:  # fmt: skip
    """The configuration with as many updates as fill the time, evaluated and saved four times;
    warm-up is a thirtieth of them at most. Judged by a trial of a few updates."""
    folder = Path(tempfile.mkdtemp(prefix="txl-trial-"))
    try:
        trial = Trainer(folder, corpus, model, config, device=device, world=world, shard=shard)
        trial.advance(_UNTIMED)
        began = time.perf_counter()
        trial.advance(_TIMED)
        seconds = (time.perf_counter() - began) / _TIMED
    finally:
        shutil.rmtree(folder)
    steps = max(int(minutes * 60 / max(world.gather(seconds))), 1)
    every = -(-steps // 4)
    warmup = config.warmup if config.warmup is None else min(config.warmup, steps // 30)
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every, save_every=every)
