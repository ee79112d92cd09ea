"""What a process reads of each segment: its streams, in chunks, with the memory of each chunk."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from txl.distributed import World
from txl.errors import TxlError
from txl.model.config import Config, ModelConfig
from txl.model.transformer import HiddenMemory
from txl.precision import autocast_dtype
from txl.text.streams import OrderedStreams, ShuffledStreams
from txl.training.checkpoint import Checkpoint
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
        memories: of each chunk, in order of the rows; under autocast in its dtype.
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
        self.rows, self.batch = world.rows(config.batch), config.batch
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
        kept = memory if memory is None or self.dtype is None else tuple(x.to(self.dtype) for x in memory)
        self.memories[number] = kept

    def state_dict(self) -> dict[str, Tensor]:
        """Memory of each part of the batch, in order of the rows: for the first process that of all
        processes, for the others nothing; to be called by all of them."""
        tensors: dict[str, Tensor] = {}
        for chunk, memory in enumerate(self.memories):
            for i, states in enumerate(memory or ()):
                for rank, part in enumerate(self.world.gather_tensors(states)):
                    tensors[f"memory.{rank * len(self.memories) + chunk}.{i}"] = part
        return tensors

    def load_state_dict(self, saved: Checkpoint) -> None:
        """Takes the memory of this process's rows, whoever held which part of it.

        Raises:
            KeyError, ValueError: it is not whole.
        """
        count, saved_memory = len(self.memories), saved.part("memory")
        parts: dict[int, int] = {}
        for name in saved_memory:
            part, layer = (int(x) for x in name.split("."))
            parts[part] = max(parts.get(part, 0), layer + 1)
        self.memories = [None] * count
        if not parts:
            return
        begin, found = 0, []
        for part, layers in sorted(parts.items()):
            end = begin + len(saved_memory[f"{part}.0"])
            if begin < self.rows.stop and self.rows.start < end:
                held = slice(max(self.rows.start - begin, 0), self.rows.stop - begin)
                found.append([saved_memory[f"{part}.{i}"][held] for i in range(layers)])
            begin = end
        if begin != self.batch:
            raise ValueError(f"memory of {begin} streams, not of {self.batch}")
        whole = [torch.cat(layer).to(self.device).chunk(count) for layer in zip(*found, strict=True)]
        for number in range(count):
            self.keep(number, tuple(layer[number] for layer in whole))
