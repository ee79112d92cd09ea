"""Update: the segments' losses and gradients, over all processes, and the optimizer's step."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl.distributed import World
from txl.model import Network, as_transformer
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.transformer import HiddenMemory, TransformerXL
from txl.precision import autocast_dtype
from txl.training.checkpoint import Saved, check_shapes
from txl.training.config import TrainConfig
from txl.training.data import Batches
from txl.training.optimizer import WeightAverage, learning_rate, make_optimizers

SECOND_TARGET_WEIGHT = 0.5


class SegmentLoss(NamedTuple):
    """What a segment costs.

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


@dataclass(frozen=True)
class Past:
    """Memory as DDP and FSDP are to see it: not at all, or they would move it to the device."""

    memory: HiddenMemory | None


class SegmentTraining(nn.Module):
    """A network whose forward is the loss of a segment, for what hooks into forward."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, targets: Tensor, past: Past, ext_len: int, intermediate: range) -> SegmentLoss:
        """As `segment_loss`."""
        return segment_loss(self.network, tokens, targets, past.memory, ext_len=ext_len, intermediate=intermediate)


class Parallel(Protocol):
    """How gradients come together.

    Attributes:
        module: to be called as `SegmentTraining`; gradients are means over all processes.
    """

    module: nn.Module

    def last_backward(self, last: bool) -> AbstractContextManager[None]:
        """To be around forward and backward; `last` where the optimizer's step follows."""

    def clip(self, maximum: float) -> Tensor:
        """Scales the gradient to a norm of at most `maximum`; its norm before, a scalar."""

    def whole(self, network: Network) -> Network:
        """The network, or the average beside it, with all its parameters."""


class Replicated:
    """`Parallel` where each process holds all parameters; alone, nothing has to come together."""

    def __init__(self, network: Network, world: World, device: torch.device) -> None:
        self.module: nn.Module = SegmentTraining(network)
        if world.size > 1:
            places = [device] if device.type == "cuda" else None
            self.module = DistributedDataParallel(self.module, device_ids=places, gradient_as_bucket_view=True)

    def last_backward(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def clip(self, maximum: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), maximum)

    def whole(self, network: Network) -> Network:
        return network


class NotFinite(Exception):
    """A loss or gradient that is infinite or no number; the same in all processes."""


class Updated(NamedTuple):
    """Mean loss in nats, the gradient's norm before clipping, whether any process is to stop."""

    loss: float
    norm: float
    stop: bool


class Updater:
    """A network in training, with its average, optimizers and gradients."""

    def __init__(
        self, network: Network, config: TrainConfig, world: World, device: torch.device, shard: bool = False
    ) -> None:
        """shard: parameters, gradients and the optimizer's state over the processes (FSDP2), where
        `txl.training.sharded.check_shards` lets it through."""
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
            from txl.training.sharded import Sharded

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
        nll: Any = 0.0  # of the losses' dtype and device
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

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizers and average, which a continuation needs beside the network's parameters."""
        tensors = self.average.tensors()
        for n, optimizer in enumerate(self.optimizers):
            for i, slots in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{n}.{i}.{name}": torch.as_tensor(x) for name, x in slots.items()}
        return tensors

    def load_state_dict(self, saved: Saved) -> None:
        """Takes parameters, optimizers and average of a checkpoint; by all processes.

        Raises:
            TxlError: a parameter is missing, unknown or of another shape. KeyError, ValueError,
            RuntimeError: the rest is damaged.
        """
        parameters = dict(self.network.named_parameters())
        check_shapes(saved.path, {name: saved.sizes[f"model.{name}"][0] for name in saved.under("model")}, parameters)
        targets: dict[str, Tensor] = {f"model.{name}": p for name, p in parameters.items()}
        slots = [_empty_slots(saved, n, optimizer) for n, optimizer in enumerate(self.optimizers)]
        for n, of_optimizer in enumerate(slots):
            for i, named in of_optimizer.items():
                targets |= {f"optimizer.{n}.{i}.{name}": x for name, x in named.items()}
        targets |= self.average.tensors()
        self.average.losses, self.average.started = list(saved.state["losses"]), saved.state["averaging"]
        saved.fill(targets)
        for optimizer, state in zip(self.optimizers, slots, strict=True):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _empty_slots(saved: Saved, n: int, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """Empty tensors for the state of an optimizer, sharded as the parameters they belong to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found: dict[int, dict[str, Tensor]] = {}
    for name in saved.under(f"optimizer.{n}"):
        i, slot = name.split(".", 1)
        shape, dtype = saved.sizes[f"optimizer.{n}.{name}"]
        like = parameters[int(i)].detach()
        same = shape == like.shape
        fresh = torch.empty_like(like, dtype=dtype) if same else torch.empty(shape, dtype=dtype, device="cpu")
        found.setdefault(int(i), {})[slot] = fresh
    return found
