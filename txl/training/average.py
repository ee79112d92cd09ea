"""Averages of the weights: what is validated and kept as the best."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from txl.model import Network
from txl.training.config import TrainConfig


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


def mean_of(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each of the tensors, computed in float64, in their own dtype."""
    return {name: torch.stack([s[name].double() for s in states]).mean(0).to(x.dtype) for name, x in states[0].items()}
