"""What a process reads of each segment: its streams, in chunks, with the memory of each chunk."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from txl.distributed.world import World
from txl.errors import TxlError
from txl.model.config import ModelConfig
from txl.model.host_memory import HostStates
from txl.model.memory import HiddenMemory, Remembered, on_device
from txl.model.networks import Config
from txl.precision import autocast_dtype
from txl.text.streams import OrderedStreams, ShuffledStreams
from txl.training.config import TrainConfig


class Chunk(NamedTuple):
    """Part of a batch that is computed at once: tokens [b, e + l], targets [b, l], memory."""

    number: int
    tokens: Tensor
    targets: Tensor
    memory: HiddenMemory | None


class Batches:
    """The streams of a batch that are this process's: contiguous rows, in order of the ranks.

    So any number of processes reads the same segments with the same memory as one.

    Attributes:
        memories: of each chunk, in order of the rows; under autocast in its dtype, and on the host
            with `offload_memory`.
    """

    def __init__(
        self,
        streams: OrderedStreams | ShuffledStreams,
        config: TrainConfig,
        model: Config,
        world: World,
        device: torch.device,
    ) -> None:
        """Raises TxlError if the processes' chunks would not be of one size."""
        if config.batch % (world.size * config.batch_chunk):
            raise TxlError(
                f"batch must be a multiple of the number of processes times batch_chunk, {world.size} x "
                f"{config.batch_chunk}, got {config.batch}"
            )
        self.streams, self.device, self.world = streams, device, world
        # A Transformer's memory is only multiplied, in autocast's dtype; an LSTM's state adds up.
        self.dtype = autocast_dtype(config.precision, device) if isinstance(model, ModelConfig) else None
        self.offload, self.mem_len, self.segment_len = (
            config.offload_memory,
            model.mem_len,
            config.scored + config.context,
        )
        self.rows = world.rows(config.batch)
        self.memories: list[HiddenMemory | None] = [None] * config.batch_chunk

    def segment(self, n: int) -> Iterator[Chunk]:
        """The chunks of segment n, counted over epochs; `keep` what each leaves."""
        if self.streams.starts_epoch(n):
            self.memories = [None] * len(self.memories)
        tokens, targets = (x.to(self.device) for x in self.streams.segment(n, self.rows))
        chunks = zip(tokens.chunk(len(self.memories)), targets.chunk(len(self.memories)), strict=True)
        for number, (inputs, wanted) in enumerate(chunks):
            yield Chunk(number, inputs, wanted, self.memories[number])

    def keep(self, number: int, memory: HiddenMemory | None) -> None:
        """The memory a chunk leaves for its next segment."""
        self.memories[number] = None if memory is None else tuple(self._kept(x) for x in memory)

    def _kept(self, states: Remembered) -> Remembered:
        """States in the dtype and in the place where memory is kept."""
        if isinstance(states, HostStates):
            return states
        states = states if self.dtype is None else states.to(self.dtype)
        if not self.offload:
            return states
        return HostStates.of(states, self.mem_len, self.segment_len)

    def restore(self, memory: HiddenMemory | None) -> None:
        """Goes on with the memory of this process's rows, `n_layer` tensors [rows, M, d_model]."""
        count = len(self.memories)
        if memory is None:
            self.memories = [None] * count
            return
        parts = [on_device(x).to(self.device).chunk(count) for x in memory]
        for number in range(count):
            self.keep(number, tuple(layer[number] for layer in parts))
