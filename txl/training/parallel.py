"""A network as its processes compute it: alone or replicated (DDP); sharded in sharding.py."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl.distributed.world import World
from txl.model import Network
from txl.model.transformer import HiddenMemory
from txl.training.losses import SegmentLoss, segment_loss


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

    def clip(self, most: float) -> Tensor:
        """Scales the gradient to a norm of at most `most`; its norm before, a scalar."""

    def whole(self, network: Network) -> Network:
        """The network, or the average beside it, with all its parameters."""


class Replicated:
    """Each process holds all parameters; alone, nothing has to come together."""

    def __init__(self, network: Network, world: World, device: torch.device) -> None:
        self.module: nn.Module = SegmentTraining(network)
        if world.size > 1:
            places = [device] if device.type == "cuda" else None
            self.module = DistributedDataParallel(self.module, device_ids=places, gradient_as_bucket_view=True)

    def last_backward(self, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def clip(self, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), most)

    def whole(self, network: Network) -> Network:
        return network
