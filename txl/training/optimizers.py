"""The optimizers of a run, and the average of the weights."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from txl import graphs
from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import TransformerXL
from txl.training.config import TrainConfig


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
