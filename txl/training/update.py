"""One update: the segments' losses and gradients, over all processes, and the optimizer's step."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from txl.distributed.world import World
from txl.errors import TxlError
from txl.model.networks import Network
from txl.model.transformer import TransformerXL
from txl.precision import autocast_dtype
from txl.training.average import WeightAverage
from txl.training.batches import Batches
from txl.training.config import TrainConfig
from txl.training.losses import layers_that_predict
from txl.training.optimizer import make_optimizers
from txl.training.parallel import Parallel, Past, Replicated
from txl.training.schedule import learning_rate
from txl.training.shards import NEEDS_SHARDS, torch_has_shards


class NotFinite(Exception):
    """A loss or gradient that is infinite or no number; the same in all processes."""


class Updated(NamedTuple):
    """Mean loss in nats, the gradient's norm before clipping, whether any process is to stop."""

    loss: float
    norm: float
    stop: bool


def check_shards(config: TrainConfig) -> None:
    """Raises TxlError where a run cannot be sharded."""
    if config.optimizer == "muon":
        raise TxlError("--shard is for optimizer 'adam': 'muon' needs whole matrices")
    if not torch_has_shards():
        raise TxlError(f"--shard {NEEDS_SHARDS}")


class Updater:
    """A network in training, with its average, optimizers and gradients."""

    def __init__(
        self, network: Network, config: TrainConfig, world: World, device: torch.device, shard: bool = False
    ) -> None:
        """shard: parameters, gradients and the optimizer's state over the processes (FSDP2), where
        `check_shards` lets it through."""
        self.network, self.config, self.world, self.device = network, config, world, device
        self.dtype = autocast_dtype(config.precision, device)
        if isinstance(network, TransformerXL):
            for block in network.layers:
                block.recompute = config.recompute
                if config.compile:
                    block.compile(dynamic=True)
        self.average = WeightAverage(network, config)
        self.parallel: Parallel
        if shard:
            from txl.training.sharding import Sharded  # half a second that most commands can do without

            self.parallel = Sharded(network, self.average.module, world, device, self.dtype)
        else:
            self.parallel = Replicated(network, world, device)
        self.optimizers = make_optimizers(network, config)

    def update(self, step: int, batches: Batches, stopping: Callable[[], bool] = lambda: False) -> Updated:
        """The update after `step` others; stopping: whether this process is to stop after it.

        Raises:
            NotFinite: loss or gradient are; nothing was changed.
        """
        c = self.config
        self.network.train()
        nll = torch.zeros((), device=self.device)
        intermediate = range(0)
        if c.intermediate_losses:
            intermediate = layers_that_predict(self.network.config.n_layer, step / c.steps)
        parts = c.accumulate * c.batch_chunk
        for part in range(c.accumulate):
            for chunk in batches.segment(step * c.accumulate + part):
                last = part == c.accumulate - 1 and chunk.number == c.batch_chunk - 1
                with self.parallel.last_backward(last):
                    with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                        loss = self.parallel.module(
                            chunk.tokens, chunk.targets, Past(chunk.memory), c.context, intermediate
                        )
                    (loss.total / parts).backward()
                batches.keep(chunk.number, loss.memory)
                nll += loss.nll / parts
        norm = self.parallel.clip(c.clip)
        told = self.world.total(torch.stack([nll, torch.full_like(nll, float(stopping()))]))
        total, stops, length = torch.cat([told, norm.to(told.dtype).reshape(1)]).tolist()  # the one wait for the device
        total /= self.world.size
        if not math.isfinite(total) or not math.isfinite(length):
            raise NotFinite(
                f"the loss became {total}" if not math.isfinite(total) else f"the gradient's norm became {length}"
            )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, c)
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        self.average.update()
        return Updated(total, length, stops > 0)

    def whole(self, network: Network) -> Network:
        """The network or its average with all parameters; to be called by all processes."""
        return self.parallel.whole(network)
