"""The update: this process's part of each segment, losses and gradients over all processes, the
optimizer's step, and the average of the weights."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from txl import graphs
from txl.distributed import World
from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.config import Config, ModelConfig
from txl.model.transformer import HiddenMemory, TransformerXL
from txl.paper.recurrent import RecurrentNetwork
from txl.text.streams import Streams
from txl.training.checkpoint import Checkpoint, check_shapes, load_parameters
from txl.training.config import TrainConfig, autocast_dtype, learning_rate

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


def layer_matrices(model: Network) -> list[nn.Parameter]:
    """Return the layers' projections (q, k, v, r, output) and feed-forward matrices; for an LSTM or
    QRNN, its matrices."""
    if isinstance(model, RecurrentNetwork):
        return [p for p in model.blocks.parameters() if p.dim() == 2]
    linears = (module for module in model.blocks.modules() if isinstance(module, nn.Linear))
    return [p for linear in linears for name, p in linear.named_parameters() if name == "weight"]


def make_optimizers(model: Network, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Make one optimizer, or two with Muon: for the layers' matrices and for all other parameters.

    On a CUDA device Adam is fused and capturable, its learning rate a tensor, so that a CUDA graph
    of its step can be replayed with another rate.

    Raises:
        TxlError: this torch has no Muon, or Muon is chosen for an LSTM or QRNN.
    """
    matrices = layer_matrices(model)
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    if config.optimizer == "muon":
        rest = torch.optim.Adam(others, lr=config.lr)
        return [_muon(as_transformer(model, "optimizer 'muon'"), matrices, config), rest]
    options: dict[str, Any] = {"lr": config.lr}
    if graphs.is_capturable(model.device):
        rate = torch.tensor(config.lr, dtype=torch.float32, device=model.device)
        options = {"lr": rate, "fused": True, "capturable": True}
    if config.weight_decay == 0:
        return [torch.optim.Adam(model.parameters(), **options)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, **options)]


def _muon(model: TransformerXL, matrices: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Make Muon for the layers' matrices, with q, k and v of a fused projection as separate ones:
    its parameters are views of their rows."""
    if not hasattr(torch.optim, "Muon"):
        raise TxlError(f"optimizer 'muon' needs torch 2.9 or newer, this is {torch.__version__}")
    fused = {id(block.attention.qkv.weight) for block in model.layers}
    parts = []  # a matrix, and those of its rows that are a separate one
    for p in matrices:
        count = 3 if id(p) in fused else 1
        size = p.size(0) // count
        parts += [(p, slice(i * size, (i + 1) * size)) for i in range(count)]
    views = [nn.Parameter(whole.detach()[rows]) for whole, rows in parts]

    class OfRows(torch.optim.Muon):
        def step(self, closure: Any = None) -> Any:
            for view, (whole, rows) in zip(views, parts, strict=True):
                view.grad = None if whole.grad is None else whole.grad[rows]
            result = super().step(closure)  # type: ignore[no-untyped-call]
            for view in views:
                view.grad = None
            return result

    # Scales updates to the size of Adam's, so that both optimizers can share the learning rate.
    return OfRows(views, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")


class WeightAverage:
    """An average of a model's weights, of the kind named by `TrainConfig.average`.

    Attributes:
        module: the network that holds the average, even before averaging begins; None without an
            average.
        count: number of averaged updates, a scalar tensor.
        losses: losses of all validations so far, in order.
        started: whether averaging has begun.
    """

    def __init__(self, model: Network, config: TrainConfig) -> None:
        self.source, self.config = model, config
        self.module = None if config.average == "none" else copy.deepcopy(model)
        self.count = torch.tensor(0, device="cpu")
        self.started = config.average == "ema"
        self.losses: list[float] = []

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; to be called after every update of the model."""
        if self.module is None or not self.started:
            return
        ema = self.config.average == "ema" and self.count > 0
        share = 1 - self.config.ema_decay if ema else 1 / (int(self.count) + 1)
        for mean, p in zip(self.module.parameters(), self.source.parameters(), strict=True):
            mean.lerp_(p, share)
        self.count += 1

    @property
    def model(self) -> Network:
        """The average as a model, or the model itself before averaging begins."""
        return self.source if self.module is None or not self.count else self.module

    def validated(self, loss: float) -> None:
        """Record a validation's loss, and start a triggered average if it is due (`is_due`)."""
        if self.config.average == "triggered" and not self.started:
            self.started = is_due(self.losses, loss, self.config.patience)
        self.losses.append(loss)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must store besides `losses` and `started`."""
        if self.module is None:
            return {}
        return {f"average.{name}": p for name, p in self.module.named_parameters()} | {"average_count": self.count}


def is_due(losses: Sequence[float], loss: float, patience: int) -> bool:
    """Whether a validation's loss exceeds the best of all earlier ones without the last `patience`
    (non-monotone trigger, Merity et al. 2018, algorithm 1)."""
    return len(losses) > patience and loss > min(losses[:-patience])


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
            TxlError: the loss or gradient is not finite; nothing was changed.
        """
        self.network.train()
        in_graphs = self.graphs is not None and self.graphs.takes(step, batches)
        nll, norm = self.graphs.gradients(step, batches) if in_graphs else self._gradients(step, batches)  # type: ignore[union-attr]
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
        if in_graphs:
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


def why_not_graphs(network: Network, config: TrainConfig, world: World, device: torch.device) -> str | None:
    """Return the reason why updates cannot be captured in CUDA graphs, or None."""
    if not graphs.is_capturable(device):
        return f"the device is {device}"
    if world.size > 1:
        return "there are several processes"
    ordinary = {
        "accumulate": 1, "batch_chunk": 1, "compile": False, "recompute": False, "intermediate_losses": False,
        "average": "none", "optimizer": "adam", "context": 0,
    }  # fmt: skip
    for name, value in ordinary.items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)!r}"
    if network.second_softmax is not None:
        return "there is a second softmax"
    return graphs.why_not(network)


class UpdateGraphs:
    """An update as two CUDA graphs: forward, backward and clipping; and the optimizer's step, since
    the host decides between them whether loss and gradient are finite.

    The first WARM_UP updates with a full memory run without. So does every update whose memory is
    not full, or whose segment is shorter, as at the start and end of an epoch, or whose model has
    hooks by then.
    """

    def __init__(self, updater: "Updater") -> None:
        self._updater, self._watch = updater, graphs.Watch(updater.network)
        self._seen = 0
        self._gradients: graphs.Captured[tuple[Tensor, Tensor]] | None = None
        self._step: Callable[[], None] | None = None

    def takes(self, step: int, batches: Batches) -> bool:
        """Whether the update after `step` earlier ones runs as graphs."""
        mem_len, memory, streams = self._updater.network.config.mem_len, batches.memories[0], batches.streams
        if mem_len and (streams.starts_epoch(step) or memory is None or memory[0].size(1) < mem_len):
            return False
        if not streams.is_whole(step) or self._watch.why_not() is not None:
            return False
        self._seen += 1
        return self._seen > graphs.WARM_UP

    def gradients(self, step: int, batches: Batches) -> tuple[Tensor, Tensor]:
        """Compute the clipped gradients as `Updater._gradients` does, by a replay.

        The memory of `batches` becomes the graph's.
        """
        ((tokens, targets, memory),) = batches.segment(step)
        given = (tokens, targets, *(memory or ()))
        if self._gradients is None:
            static = [x.clone() for x in given]
            self._gradients = graphs.Captured(self._compute, static)
            _, self._step = graphs.capture(self._updater.optimizers[0].step, (), self._updater.device)
            # The graphs keep the gradients' memory; no other update may see these tensors.
            self._updater.network.zero_grad(set_to_none=True)
        result = self._gradients(*given)
        batches.keep(0, tuple(self._gradients.inputs[2:]) or None)
        return result

    def _compute(self, tokens: Tensor, targets: Tensor, *memory: Tensor) -> tuple[Tensor, Tensor]:
        loss = self._updater.loss(tokens, targets, memory or None)
        loss.total.backward()
        for own, new in zip(memory, loss.memory or (), strict=True):
            own.copy_(new)
        return loss.nll, self._updater.clip()

    def step_optimizer(self) -> None:
        """Step the optimizer by the gradients that `gradients` computed last."""
        assert self._step is not None
        self._step()
