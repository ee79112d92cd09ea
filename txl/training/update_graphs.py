"""An update as two CUDA graphs, and the options of a run and its model that they take."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from txl import graphs
from txl.distributed import World
from txl.model import Network
from txl.training.config import TrainConfig
from txl.training.segments import Batches

if TYPE_CHECKING:
    from txl.training.update import Updater

# Options of training and of a model with the values that captured updates need; and the others,
# which act outside of the captured steps, or by tensors, or are compared before each replay.
NEEDS_DEFAULT = {
    "accumulate": 1, "batch_chunk": 1, "compile": False, "recompute": False, "intermediate_losses": False,
    "average": "none", "optimizer": "adam", "ext_len": 0, "loss": "full", "cutoffs": (), "second_target": False,
}  # fmt: skip
IN_GRAPHS = {
    "steps", "batch", "streams", "tgt_len", "lr", "warmup", "schedule", "min_lr_ratio", "weight_decay", "clip",
    "ema_decay", "patience", "eval_every", "eval_tokens", "save_every", "log_every", "seed", "precision",
    # Of the model: sizes, modules and numbers of the network whose steps are captured.
    "vocab_size", "n_layer", "d_model", "n_head", "d_head", "d_inner", "dropout", "attn_dropout", "mem_len",
    "encoding", "table_len", "window", "clamp_len", "pre_norm", "final_norm", "untie_r", "norm_eps", "norm_std",
    "initial_memory", "div_val", "d_embed", "tie_weight", "tie_projs", "proj_same_dim", "variational_dropout",
    "embedding_dropout", "output_dropout", "word_dropout", "init_std", "proj_init_std",
}  # fmt: skip


def why_not_graphs(network: Network, config: TrainConfig, world: World, device: torch.device) -> str | None:
    """Return the reason why updates cannot be captured in CUDA graphs, or None."""
    if not graphs.is_capturable(device):
        return f"the device is {device}"
    if world.size > 1:
        return "there are several processes"
    options = network.config.to_json() | config.to_json()
    for name, value in NEEDS_DEFAULT.items():
        if options.get(name, value) != value:
            return f"{name} is {options[name]!r}"
    return graphs.why_not(network)


class UpdateGraphs:
    """An update as two CUDA graphs: forward, backward and clipping; and the optimizer's step, since
    the host decides between them whether loss and gradient are finite.

    Updates run without graphs until `graphs.Steps` has seen enough of a kind, and where gradients
    are left from elsewhere, the memory is not full, or the segment is shorter, as at the start and
    end of an epoch. There the graphs are dropped if the device is short of memory, which they keep
    from those updates.
    """

    def __init__(self, updater: "Updater") -> None:
        self._updater = updater
        (optimizer,) = updater.optimizers
        self._steps = graphs.Steps("training", graphs.Watch(updater.network, optimizer, self._of_updater), self._drop)
        self._kind: Hashable = None  # of the captured updates
        self._gradients: graphs.Captured[tuple[Tensor, Tensor]] | None = None
        self._step: Callable[[], None] | None = None  # the replay of the optimizer's step
        self._bytes = 0  # of the device's memory that the graphs keep

    def _of_updater(self) -> tuple[list[Any], list[Any]]:
        own = self._updater
        return [own.network, own.module, *own.optimizers], [own.config.clip, own.config.context, own.dtype]

    def _drop(self) -> bool:
        had = self._gradients is not None
        self._kind = self._gradients = self._step = None
        return had

    def gradients(self, step: int, batches: Batches) -> tuple[Tensor, Tensor] | None:
        """Compute the clipped gradients of the update after `step` earlier ones, as
        `Updater._gradients` does, by a replay. None if the update runs without graphs.

        The memory of `batches` becomes the graph's.
        """
        own = self._updater
        mem_len, memory, streams = own.network.config.mem_len, batches.memories[0], batches.streams
        fills = mem_len and (streams.starts_epoch(step) or memory is None or memory[0].size(1) < mem_len)
        if fills or not streams.is_whole(step):
            if self._gradients is not None and graphs.is_short_of_memory(own.device, self._bytes):
                self._drop()
                self._steps.restart()
            return None
        if any(p.grad is not None for p in own.network.parameters()):  # it would be added to
            return None
        ((tokens, targets, memory),) = batches.segment(step)
        given = (tokens, targets, *(memory or ()))
        kind = self._steps.kind("update", given, own.device)
        if kind is None or (self._kind is not None and kind != self._kind):
            return None
        if self._gradients is None:
            self._capture(kind, given)
        if self._gradients is None:
            return None
        result = self._gradients(*given)
        batches.keep(0, tuple(self._gradients.inputs[2:]) or None)
        return result

    def _capture(self, kind: Hashable, given: tuple[Tensor, ...]) -> None:
        """Capture both graphs; after an error all updates run without."""
        device, before = self._updater.device, graphs.reserved_memory(self._updater.device)
        try:
            self._gradients = graphs.Captured(self._compute, [x.clone() for x in given])
            _, self._step = graphs.capture(self._updater.optimizers[0].step, (), device)
            self._kind, self._bytes = kind, graphs.reserved_memory(device) - before
        except BaseException as error:
            self._drop()
            if not isinstance(error, Exception):
                raise
            self._steps.turn_off(f"a capture failed with {type(error).__name__}: {error}")
        finally:
            # The graphs keep the gradients' memory; no other update may see these tensors.
            self._updater.network.zero_grad(set_to_none=True)

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
