"""Optimizers, the learning rate of each update, and averages of the weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.recurrent import RecurrentNetwork
from txl.model.transformer import TransformerXL
from txl.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of update `step`, from 0 on: linear warm-up, then as `config.schedule` says.

    The released PyTorch code sets rates after updates, by their number. So with "cosine-released"
    the first update has the peak rate, and the second the one of a warm-up's first.
    """
    warmup, released = config.warmup_updates, config.schedule == "cosine-released"
    if released and step == 0:
        return config.lr
    if step < warmup:
        return config.lr * (step if released else step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    began = 0 if released else warmup
    done = (step - began) / max(config.steps - began, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def layer_matrices(model: Network) -> list[nn.Parameter]:
    """The layers' projections (q, k, v, r, output) and feed-forward matrices; of an LSTM or QRNN
    its matrices."""
    if isinstance(model, RecurrentNetwork):
        return [p for p in model.blocks.parameters() if p.dim() == 2]
    linears = (module for module in model.blocks.modules() if isinstance(module, nn.Linear))
    return [p for linear in linears for name, p in linear.named_parameters() if name == "weight"]


def make_optimizers(model: Network, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """One optimizer, or two with Muon: for the matrices of the layers, and for the rest.

    Raises:
        TxlError: this torch has no Muon, or Muon is asked for an LSTM or QRNN.
    """
    matrices = layer_matrices(model)
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    if config.optimizer == "muon":
        rest = torch.optim.Adam(others, lr=config.lr)
        return [_muon(as_transformer(model, "optimizer 'muon'"), matrices, config), rest]
    if config.weight_decay == 0:
        return [torch.optim.Adam(model.parameters(), lr=config.lr)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=config.lr)]


def _muon(model: TransformerXL, matrices: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise TxlError(f"optimizer 'muon' needs torch 2.9 or newer, this is {torch.__version__}")
    fused = {id(block.attention.qkv.weight) for block in model.layers}
    parts = [(p, part) for p in matrices for part in (_thirds(p) if id(p) in fused else [slice(None)])]
    return _views_under(torch.optim.Muon, parts, config)


def _thirds(matrix: Tensor) -> list[slice]:
    """Rows of q, of k and of v."""
    third = matrix.size(0) // 3
    return [slice(i * third, (i + 1) * third) for i in range(3)]


def _views_under(
    kind: type[torch.optim.Optimizer], parts: list[tuple[nn.Parameter, slice]], config: TrainConfig
) -> torch.optim.Optimizer:
    """An optimizer of rows of parameters: each part a matrix of its own, on the same storage."""

    class OfRows(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            for view, (whole, rows) in zip(views, parts, strict=True):
                view.grad = None if whole.grad is None else whole.grad[rows]
            result = super().step(closure)
            for view in views:
                view.grad = None
            return result

    views = [nn.Parameter(whole.detach()[rows]) for whole, rows in parts]
    # Updates of the size of Adam's, so that one learning rate suits both.
    return OfRows(views, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")


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
        """Where the average is kept, whether or not it has begun; None without one."""
        if self._average is None:
            return None
        averaged = self._average.module
        assert isinstance(averaged, Network)
        return averaged

    @property
    def count(self) -> Tensor:
        """How many updates are averaged, a scalar; only where there is an average."""
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
        """What a checkpoint needs, beside `losses` and `started`."""
        if self._average is None:
            return {}
        named = {f"average.{name}": p for name, p in self._average.module.named_parameters()}
        return named | {"average_count": self._average.n_averaged}


def is_due(losses: Sequence[float], loss: float, patience: int) -> bool:
    """Whether a validation is worse than the best of all before it but the last `patience` ones
    (non-monotone trigger, Merity et al. 2018, algorithm 1)."""
    return len(losses) > patience and loss > min(losses[:-patience])
