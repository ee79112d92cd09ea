"""The paper's model sizes, and the small model that implementations of whole models are checked
on."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.comparison import Role
from txl import ModelConfig, TransformerXL

ENWIK8_BASE = ModelConfig(vocab_size=204)
ENWIK8_LARGE = ModelConfig(vocab_size=204, n_layer=24, d_model=1024, d_head=128, d_inner=3072, dropout=0.15)
SMALL = ModelConfig(vocab_size=50, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, dropout=0.0)
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # relative error of the logits after two layers


class Named(NamedTuple):
    """An implementation of training or evaluation: its name, its role, and the function that makes
    it."""

    name: str
    role: Role
    make: Callable[..., Any]


@functools.cache
def small(dtype: torch.dtype, device: torch.device) -> tuple[TransformerXL, TransformerXL, Tensor]:
    """Make a small model whose weights are large enough to matter, the same model in float64 on the
    reference backend, and tokens [2, 60]."""
    torch.manual_seed(0)
    model, exact = (TransformerXL(SMALL) for _ in range(2))
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.2)
    model = model.to(dtype)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(SMALL.vocab_size, (2, 60)).to(device)
    return model.to(device), exact.to(device).double(), tokens


def text(batch: int, length: int, device: torch.device) -> Tensor:
    """Make tokens [batch, length] from the vocabulary of the paper's models."""
    return torch.randint(204, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
