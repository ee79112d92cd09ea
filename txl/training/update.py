"""Update: what a process reads of each segment, losses and gradients over all processes, the
optimizer's step, the average of the weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from txl.distributed import World
from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.config import Config, ModelConfig
from txl.model.transformer import HiddenMemory, TransformerXL
from txl.precision import autocast_dtype
from txl.text.streams import OrderedStreams, ShuffledStreams
from txl.training.checkpoint import Checkpoint, check_shapes, load_parameters
from txl.training.config import TrainConfig, learning_rate
from txl.training.optimizer import make_optimizers

SECOND_TARGET_WEIGHT = 0.5


class SegmentLoss(NamedTuple):
    """The losses of a segment.

    Attributes:
        total: to be minimised, a scalar.
        nll: mean loss of the next token, in nats, a detached scalar.
        memory: for the segment that follows.
    """

    total: Tensor
    nll: Tensor
    memory: HiddenMemory | None


def layers_that_predict(n_layer: int, done: float) -> range:
    """Layers (from 0) below the last whose predictions still count after a share `done` of
    training: the l-th of n, from 1 on, for the first l / 2n."""
    return range(int(2 * n_layer * done), n_layer - 1)


def segment_loss(
    model: Network,
    tokens: Tensor,
    targets: Tensor,
    memory: HiddenMemory | None,
    *,
    ext_len: int = 0,
    intermediate: range = range(0),
) -> SegmentLoss:
    """Mean loss over the targets, and the auxiliary losses that are switched on.

    Args:
        tokens: [B, E + L], context that was read before and the segment.
        targets: [B, L], the successors of the last L tokens.
        memory: see `TransformerXL.read`.
        ext_len: tokens at the end that the next segment reads again.
        intermediate: layers below the last that predict, too.
    """
    scored = targets.size(1)
    states = model.read(tokens, memory, ext_len=ext_len)

    def mean(softmax: AdaptiveSoftmax, hidden: Tensor, wanted: Tensor) -> Tensor:
        nll = softmax.nll(hidden, wanted)
        return nll.sum() / (wanted != IGNORED).sum().clamp(min=1)

    def predicted(hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of the next token, and with that of the one after it if the model has a softmax for
        it."""
        hidden = hidden[:, -scored:]
        first = mean(model.softmax, hidden, targets)
        if model.second_softmax is None:
            return first, first
        # The last token's second successor is in the next segment. Of one token nothing is left,
        # yet the softmax takes part, so that every parameter gets a gradient.
        return first, first + SECOND_TARGET_WEIGHT * mean(model.second_softmax, hidden[:, :-1], targets[:, 1:])

    nll, total = predicted(states.hidden)
    for i in intermediate:
        total = total + predicted(as_transformer(model, "a loss of lower layers").finish(states.layers[i]))[1]
    return SegmentLoss(total, nll.detach(), states.memory)


class SegmentTraining(nn.Module):
    """A network whose forward is the loss of a segment, since DDP hooks into forward."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, tokens: Tensor, targets: Tensor, memory: HiddenMemory | None, ext_len: int, intermediate: range
    ) -> SegmentLoss:
        """As `segment_loss`."""
        return segment_loss(self.network, tokens, targets, memory, ext_len=ext_len, intermediate=intermediate)


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


class WeightAverage:
    """An average beside a model, of the kind that `TrainConfig.average` names.

    Attributes:
        losses: of validations so far, in order.
        started: whether anything is averaged yet.
    """

    def __init__(self, model: Network, config: TrainConfig) -> None:
        self.source, self.config = model, config
        ema = get_ema_multi_avg_fn(config.ema_decay) if config.average == "ema" else None
        self._average = None if config.average == "none" else AveragedModel(model, multi_avg_fn=ema)
        self.started = config.average == "ema"
        self.losses: list[float] = []

    @property
    def module(self) -> Network | None:
        """The network that holds the average, whether or not it has begun; None without one."""
        if self._average is None:
            return None
        averaged = self._average.module
        assert isinstance(averaged, Network)
        return averaged

    @property
    def count(self) -> Tensor:
        """The number of averaged updates, a scalar; only where there is an average."""
        assert self._average is not None
        return self._average.n_averaged

    def update(self) -> None:
        """To be called after every update of the model."""
        if self._average is not None and self.started:
            self._average.update_parameters(self.source)

    @property
    def model(self) -> Network:
        """The average as a model, or the model itself as long as nothing is averaged."""
        if self._average is None or not self._average.n_averaged or self.module is None:
            return self.source
        return self.module

    def validated(self, loss: float) -> None:
        """Takes a validation's loss; starts a triggered average where it is due (`is_due`)."""
        if self.config.average == "triggered" and not self.started:
            self.started = is_due(self.losses, loss, self.config.patience)
        self.losses.append(loss)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint needs, beside `losses` and `started`."""
        if self._average is None:
            return {}
        named = {f"average.{name}": p for name, p in self._average.module.named_parameters()}
        return named | {"average_count": self._average.n_averaged}


def is_due(losses: Sequence[float], loss: float, patience: int) -> bool:
    """Whether a validation is worse than the best of all before it but the last `patience` ones
    (non-monotone trigger, Merity et al. 2018, algorithm 1)."""
    return len(losses) > patience and loss > min(losses[:-patience])


class NotFinite(Exception):
    """A loss or gradient that is infinite or no number; the same in all processes."""


class Updated(NamedTuple):
    """Mean loss in nats, the gradient's norm before clipping, whether any process is to stop."""

    loss: float
    norm: float
    stop: bool


class Updater:
    """A network in training, with its average, optimizers and gradients. Each process holds all
    parameters; gradients are means over the processes."""

    def __init__(self, network: Network, config: TrainConfig, world: World, device: torch.device) -> None:
        self.network, self.config, self.world, self.device = network, config, world, device
        self.dtype = autocast_dtype(config.precision, device)
        if isinstance(network, TransformerXL):
            for block in network.layers:
                block.recompute = config.recompute
                if config.compile:
                    block.compile(dynamic=True)
        self.average = WeightAverage(network, config)
        self.module: nn.Module = SegmentTraining(network)
        if world.size > 1:
            ids = [device] if device.type == "cuda" else None
            self.module = DistributedDataParallel(self.module, device_ids=ids, gradient_as_bucket_view=True)
        self.optimizers = make_optimizers(network, config)

    def update(self, step: int, batches: Batches, stopping: Callable[[], bool] = lambda: False) -> Updated:
        """The update after `step` others; stopping: whether this process is to stop after it.

        Raises:
            NotFinite: loss or gradient are; nothing was changed.
        """
        c, module = self.config, self.module
        self.network.train()
        nll: Any = 0.0  # of the losses' dtype and device
        intermediate = range(0)
        if c.intermediate_losses:
            intermediate = layers_that_predict(self.network.config.n_layer, step / c.steps)
        parts = c.accumulate * c.batch_chunk
        for part in range(c.accumulate):
            for chunk in batches.segment(step * c.accumulate + part):
                last = part == c.accumulate - 1 and chunk.number == c.batch_chunk - 1
                with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
                    with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
                        loss = module(chunk.tokens, chunk.targets, chunk.memory, c.context, intermediate)
                    (loss.total / parts).backward()
                batches.keep(chunk.number, loss.memory)
                nll += loss.nll / parts
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), c.clip)
        told = torch.stack([nll, torch.full_like(nll, float(stopping()))])
        if self.world.size > 1:
            dist.all_reduce(told)
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

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizers and average, which a continuation needs beside the network's parameters."""
        tensors = self.average.tensors()
        for n, optimizer in enumerate(self.optimizers):
            for i, slots in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{n}.{i}.{name}": torch.as_tensor(x) for name, x in slots.items()}
        return tensors

    def load_state_dict(self, saved: Checkpoint) -> None:
        """Takes parameters, optimizers and average of a checkpoint.

        Raises:
            TxlError: a parameter is missing, unknown or of another shape. KeyError, ValueError,
            RuntimeError: the rest is damaged.
        """
        load_parameters(self.network, saved)
        for n, optimizer in enumerate(self.optimizers):
            state = _slots(saved.part(f"optimizer.{n}"), optimizer)
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        self.average.losses, self.average.started = list(saved.state["losses"]), saved.state["averaging"]
        if self.average.module is not None:
            load_parameters(self.average.module, saved, saved.part("average"))
            name, count = "average_count", self.average.count
            check_shapes(saved.path, {k: x.shape for k, x in saved.tensors.items() if k == name}, {name: count})
            count.copy_(saved.tensors[name])


def _slots(saved: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """The state of an optimizer by parameter, from tensors named `INDEX.NAME`.

    Raises:
        IndexError, ValueError: it is of no parameter, of another shape, or not whole.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[int, dict[str, Tensor]] = {}
    for name, x in saved.items():
        i, slot = name.split(".", 1)
        shape = parameters[int(i)].shape
        if x.dim() and x.shape != shape:
            raise ValueError(f"optimizer state {name} has shape {list(x.shape)}, its parameter {list(shape)}")
        found.setdefault(int(i), {})[slot] = x
    names = {name for slots in found.values() for name in slots}
    for n, slots in found.items():
        for missing in names - slots.keys():
            raise ValueError(f"optimizer state {n}.{missing} is missing")
    return found
