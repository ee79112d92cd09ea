"""A network whose parameters, gradients and optimizer state its processes share out (FSDP2)."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from txl.distributed.world import World
from txl.model import Network, make_network
from txl.model.config import PLACES
from txl.model.transformer import Trunk
from txl.training.parallel import SegmentTraining


class Sharded:
    """Each process holds a part of every parameter, of its gradient and of the optimizer's state.

    A layer's parameters are gathered for as long as it computes. Layers that share parameters
    (`untie_r` off), or have some outside forward (learned places), are gathered all at once.
    """

    def __init__(
        self, network: Network, average: nn.Module | None, world: World, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        """dtype: what gathered parameters are rounded to; None for their own. Gradients are summed
        in float32."""
        mesh = init_device_mesh(device.type, (world.size,))
        policy = (
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
        )
        self.module: nn.Module = SegmentTraining(network)
        _shard(self.module, mesh, policy)
        if average is not None:
            _shard(average, mesh, policy)

    def last_backward(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()  # a whole gradient a process would take the memory that sharding saves

    def clip(self, most: float) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), most)
        assert isinstance(norm, DTensor)
        return norm.full_tensor()

    def whole(self, network: Network) -> Network:
        with torch.device("meta"):
            copy = make_network(network.config)
        copy.to_empty(device=network.device)
        with torch.no_grad():
            for into, p in zip(copy.parameters(), network.parameters(), strict=True):
                into.copy_(p.full_tensor() if isinstance(p, DTensor) else p)
        return copy


def _shard(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    for trunk in [part for part in module.modules() if isinstance(part, Trunk)]:
        config = trunk.config
        if config.encoding not in PLACES and (config.encoding != "relative" or config.untie_r):
            for block in trunk.layers:
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
