"""Optimizers and the parameters that each of them updates."""

from typing import Any

import torch
from torch import nn

from txl.errors import TxlError
from txl.model import Network, as_transformer
from txl.model.transformer import TransformerXL
from txl.paper.recurrent import RecurrentNetwork
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

    Raises:
        TxlError: this torch has no Muon, or Muon is chosen for an LSTM or QRNN.
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
