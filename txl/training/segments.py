"""A segment's part in training: the loss of a network on it, and the streams and memories of a
batch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from txl.distributed import World
from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.config import Config, ModelConfig
from txl.model.transformer import HiddenMemory
from txl.text.streams import Streams
from txl.training.checkpoint import Checkpoint
from txl.training.config import TrainConfig, autocast_dtype

SECOND_TARGET_WEIGHT = 0.5


class SegmentLoss(NamedTuple):
    """The losses of a segment.

    Attributes:
        total: the loss to minimise, a scalar.
        nll: mean loss of the next token in nats, a detached scalar.
        memory: the memory for the next segment.
    """

    total: Tensor
    nll: Tensor
    memory: HiddenMemory | None


def layers_that_predict(n_layer: int, done: float) -> range:
    """Return the layers (from 0) below the last whose predictions are still trained after a
    fraction `done` of training: layer l of n, counted from 1, is until l / 2n."""
    return range(int(2 * n_layer * done), n_layer - 1)


class SegmentTraining(nn.Module):
    """A network whose forward returns the loss of a segment, because DDP hooks into forward."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: HiddenMemory | None,
        ext_len: int = 0,
        intermediate: Sequence[int] = (),
    ) -> SegmentLoss:
        """Compute the mean loss over the targets plus the auxiliary losses that are switched on.

        Args:
            tokens: [B, E + L], context of E tokens that were read before, then the segment.
            targets: [B, L], the tokens that follow the last L of `tokens`.
            memory: see `TransformerXL.read`.
            ext_len: tokens at the end that the next segment reads again.
            intermediate: indices of layers below the last whose predictions are trained too.
        """
        scored = targets.size(1)
        model = self.network
        states = model.read(tokens, memory, ext_len=ext_len)

        def mean(softmax: AdaptiveSoftmax, hidden: Tensor, wanted: Tensor) -> Tensor:
            nll = softmax.nll(hidden, wanted)
            return nll.sum() / (wanted != IGNORED).sum().clamp(min=1)

        def predicted(hidden: Tensor) -> tuple[Tensor, Tensor]:
            """Return the loss of the next token, and that loss plus the weighted loss of the token
            after it if the model has a second softmax."""
            hidden = hidden[:, -scored:]
            first = mean(model.softmax, hidden, targets)
            if model.second_softmax is None:
                return first, first
            # The second target of the last token is in the next segment. A segment of one token has
            # no second target, but the softmax is computed so that every parameter gets a gradient.
            return first, first + SECOND_TARGET_WEIGHT * mean(model.second_softmax, hidden[:, :-1], targets[:, 1:])

        nll, total = predicted(states.hidden)
        for i in intermediate:
            total = total + predicted(as_transformer(model, "a loss of lower layers").finish(states.layers[i]))[1]
        return SegmentLoss(total, nll.detach(), states.memory)


class Batches:
    """This process's streams of a batch: contiguous rows, in order of the ranks.

    Segments and memory of a stream therefore do not depend on the number of processes.

    Attributes:
        memories: the memory of each chunk, in order of the rows; under autocast in its dtype.
    """

    def __init__(
        self,
        streams: Streams,
        config: TrainConfig,
        model: Config,
        world: World,
        device: torch.device,
    ) -> None:
        """Raise TxlError if chunks of the processes would differ in size."""
        if config.batch % (world.size * config.batch_chunk):
            raise TxlError(
                f"batch must be a multiple of the number of processes times batch_chunk, {world.size} x "
                f"{config.batch_chunk}, got {config.batch}"
            )
        self.streams, self.model, self.device, self.world = streams, model, device, world
        # A Transformer's memory is only an input of products, which run in autocast's dtype anyway;
        # an LSTM's state accumulates and keeps its precision.
        self.dtype = autocast_dtype(config.precision, device) if isinstance(model, ModelConfig) else None
        self.rows, self.batch = world.rows(config.batch), config.batch
        self.memories: list[HiddenMemory | None] = [None] * config.batch_chunk

    def segment(self, n: int) -> Iterator[tuple[Tensor, Tensor, HiddenMemory | None]]:
        """Yield tokens [b, e + l], targets [b, l] and memory of each chunk of segment n, counted
        over all epochs; call `keep` with each one's new memory."""
        if self.streams.starts_epoch(n):
            self.memories = [None] * len(self.memories)
        tokens, targets = (x.to(self.device) for x in self.streams.segment(n, self.rows))
        count = len(self.memories)
        yield from zip(tokens.chunk(count), targets.chunk(count), self.memories, strict=True)

    def keep(self, number: int, memory: HiddenMemory | None) -> None:
        """Store the memory that a chunk's next segment begins with."""
        kept = memory if memory is None or self.dtype is None else tuple(x.to(self.dtype) for x in memory)
        self.memories[number] = kept

    def state_dict(self) -> dict[str, Tensor]:
        """Return each layer's memory of the whole batch, in the first process; an empty dict in the
        others. All processes must call it."""
        tensors: dict[str, Tensor] = {}
        for i, chunks in enumerate(zip(*[memory or () for memory in self.memories], strict=True)):
            parts = self.world.gather_tensors(chunks[0] if len(chunks) == 1 else torch.cat(chunks))
            if parts:
                tensors[f"memory.{i}"] = torch.cat(parts)
        return tensors

    def load_state_dict(self, saved: Checkpoint) -> None:
        """Load the memory of this process's rows, which other processes may have saved.

        Raises:
            KeyError, ValueError: memory of some rows or layers is missing.
        """
        count = len(saved.part("memory"))
        whole = [saved.tensors[f"memory.{i}"] for i in range(count)]
        if any(len(x) != self.batch for x in whole):
            raise ValueError(f"memory of {[len(x) for x in whole]} streams, not of {self.batch}")
        if whole and isinstance(self.model, ModelConfig):
            layers, width, shape = self.model.n_layer, self.model.d_model, whole[0].shape
            if count != layers or shape[2:] != (width,) or any(x.shape != shape for x in whole):
                shapes = [list(x.shape) for x in whole]
                raise ValueError(f"memory of {layers} layers must be [batch, length, {width}] each, got {shapes}")
            if not all(x.is_floating_point() for x in whole):
                raise ValueError(f"memory must be floating-point numbers, got {whole[0].dtype}")
        self.memories = [None] * len(self.memories)
        # Copies, because a tensor begins anywhere in the checkpoint's mapped file, and products of
        # numbers that are aligned otherwise round otherwise.
        parts = [[part.clone() for part in x[self.rows].to(self.device).chunk(len(self.memories))] for x in whole]
        for number, memory in enumerate(zip(*parts, strict=True)):
            self.keep(number, memory)
