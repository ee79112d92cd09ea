"""The update: losses and gradients over all processes, clipping, and the optimizers' step."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl import graphs
from txl.distributed import World
from txl.errors import TxlError
from txl.model import Network
from txl.model.transformer import HiddenMemory, TransformerXL
from txl.training.checkpoint import Checkpoint, check_shapes, load_parameters
from txl.training.config import TrainConfig, autocast_dtype, learning_rate
from txl.training.optimizers import WeightAverage, make_optimizers
from txl.training.segments import Batches, SegmentLoss, SegmentTraining, layers_that_predict
from txl.training.update_graphs import UpdateGraphs, why_not_graphs


class Updated(NamedTuple):
    """Mean loss in nats, norm of the gradient before clipping, and whether any process asks to
    stop."""

    loss: float
    norm: float
    stop: bool


class Updater:
    """A network in training with its average, optimizers and gradients. Each process holds all
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
        reason = why_not_graphs(network, config, world, device)
        self.graphs = UpdateGraphs(self) if reason is None else None
        if reason is not None and graphs.is_capturable(device):
            graphs.log.info("training runs without CUDA graphs: %s", reason)

    def update(self, step: int, batches: Batches, stopping: Callable[[], bool] = lambda: False) -> Updated:
        """Do one update, after `step` earlier ones; stopping: returns whether this process asks to
        stop.

        Raises:
            TxlError: the loss or gradient is not finite; no parameter was changed. The memory is
                that after the segment.
        """
        self.network.train()
        try:
            return self._update(step, batches, stopping)
        except BaseException:
            self.network.zero_grad(set_to_none=True)  # the next update would add to them
            raise

    def _update(self, step: int, batches: Batches, stopping: Callable[[], bool]) -> Updated:
        found = None if self.graphs is None else self.graphs.gradients(step, batches)
        nll, norm = self._gradients(step, batches) if found is None else found
        reduced = torch.stack([nll, torch.full_like(nll, float(stopping()))])
        if self.world.size > 1:
            dist.all_reduce(reduced)
        # the only synchronization with the device
        total, stops, length = torch.cat([reduced, norm.to(reduced.dtype).reshape(1)]).tolist()
        total /= self.world.size
        if not math.isfinite(total) or not math.isfinite(length):
            what = f"the loss became {total}" if not math.isfinite(total) else f"the gradient's norm became {length}"
            raise TxlError(f"{what} at step {step + 1}; the run's last checkpoint, if there is one, is from before")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = learning_rate(step, self.config)
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        if found is not None:
            self.graphs.step_optimizer()  # type: ignore[union-attr]
        else:
            self.step_optimizers()
        self.average.update()
        return Updated(total, length, stops > 0)

    def _gradients(self, step: int, batches: Batches) -> tuple[Tensor, Tensor]:
        """Compute the gradients of an update, clipped.

        Returns: the mean loss in nats and the norm before clipping, scalars on the device.
        """
        c, module = self.config, self.module
        nll: Any = 0.0  # becomes a tensor of the losses' dtype and device
        intermediate = range(0)
        if c.intermediate_losses:
            intermediate = layers_that_predict(self.network.config.n_layer, step / c.steps)
        parts = c.accumulate * c.batch_chunk
        for part in range(c.accumulate):
            for number, chunk in enumerate(batches.segment(step * c.accumulate + part)):
                last = part == c.accumulate - 1 and number == c.batch_chunk - 1
                with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
                    loss = self.loss(*chunk, intermediate)
                    (loss.total / parts).backward()
                batches.keep(number, loss.memory)
                nll += loss.nll / parts
        return nll, self.clip()

    def loss(
        self, tokens: Tensor, targets: Tensor, memory: HiddenMemory | None, intermediate: Sequence[int] = ()
    ) -> SegmentLoss:
        """Compute the loss of a segment in training's precision; arguments as in
        `SegmentTraining`."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            loss: SegmentLoss = self.module(tokens, targets, memory, self.config.context, intermediate)
        return loss

    def clip(self) -> Tensor:
        """Scale the gradients to the largest norm allowed; return their norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)

    def step_optimizers(self) -> None:
        """Step all optimizers and free the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of optimizers and average; the network's parameters are not in it."""
        tensors = self.average.tensors()
        for n, optimizer in enumerate(self.optimizers):
            for i, slots in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{n}.{i}.{name}": torch.as_tensor(x) for name, x in slots.items()}
        return tensors

    def load_state_dict(self, saved: Checkpoint) -> None:
        """Load parameters, optimizers and average from a checkpoint.

        Raises:
            TxlError: a parameter, or an optimizer's state of one, is missing, unknown or of another
                shape.
            KeyError, ValueError, RuntimeError: the rest is damaged.
        """
        load_parameters(self.network, saved)
        for n, optimizer in enumerate(self.optimizers if saved.state["step"] else ()):
            found, scalar = saved.part(f"optimizer.{n}"), torch.empty(())
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            slots = ("step", "exp_avg", "exp_avg_sq") if optimizer is self.optimizers[-1] else ("momentum_buffer",)
            wanted = {
                f"{i}.{slot}": scalar if slot == "step" else p for i, p in enumerate(parameters) for slot in slots
            }
            check_shapes(saved.path, {name: x.shape for name, x in found.items()}, wanted)
            state = {i: {slot: found[f"{i}.{slot}"] for slot in slots} for i in range(len(parameters))}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        self.average.losses, self.average.started = list(saved.state["losses"]), saved.state["averaging"]
        if self.average.module is not None:
            load_parameters(self.average.module, saved, saved.part("average"))
            name, count = "average_count", self.average.count
            check_shapes(saved.path, {k: x.shape for k, x in saved.tensors.items() if k == name}, {name: count})
            count.copy_(saved.tensors[name])
            if count < 0:
                raise ValueError(f"{name} must be >= 0, got {int(count)}")
