"""The learning rate of each update."""

import math

from txl.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of update `step`, from 0 on: linear warm-up, then as `config.schedule` says."""
    warmup = config.warmup_updates
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    began = 0 if config.schedule == "cosine-released" else warmup
    done = (step - began) / max(config.steps - began, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
