"""One process as the first of many, whose others are pretended: torch's "fake" backend."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from txl import ModelConfig, TransformerXL
from txl.distributed.world import World
from txl.text.streams import OrderedStreams
from txl.training.batches import Batches
from txl.training.config import TrainConfig
from txl.training.update import Updater

PAYLOADS = {"_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1)}


@contextmanager
def fake_world(size: int) -> Iterator[World]:
    """The first of `size` processes; what it would get from others is left as it was."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield World(0, size)
    finally:
        dist.destroy_process_group()


def training(model: ModelConfig, train: TrainConfig, world: World, shard: bool) -> tuple[Updater, Batches]:
    """What `Trainer` makes, on a text drawn by Zipf's law."""
    torch.manual_seed(0)
    updater = Updater(TransformerXL(model), train, world, torch.device("cpu"), shard)
    return updater, batches_of(model, train, world)


def batches_of(model: ModelConfig, train: TrainConfig, world: World) -> Batches:
    chances = 1 / np.arange(1, model.vocab_size + 1)
    drawn = np.random.default_rng(0).choice(model.vocab_size, 20_000, p=chances / chances.sum())
    streams = OrderedStreams(drawn, train.batch, train.scored, train.context)
    return Batches(streams, train, model, world, torch.device("cpu"))


class Exchanged(TorchDispatchMode):
    """Bytes of whole tensors that are gathered and scattered (`bytes`), and how often (`calls`)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in PAYLOADS:
            kind, place = PAYLOADS[name]
            self.bytes[kind] += args[place].nbytes
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def reduced_by_ddp(updater: Updater) -> list[int]:
    """A list that grows by the bytes of each bucket whose gradients DDP sums."""
    sizes: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    updater.parallel.module.register_comm_hook(None, hook)
    return sizes
