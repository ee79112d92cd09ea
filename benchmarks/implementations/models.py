"""The paper's model sizes, and the small model that implementations of whole models are checked
on."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.comparison import Role
from txl import ModelConfig, TransformerXL, recipes

ENWIK8_BASE = ModelConfig(vocab_size=204)
ENWIK8_LARGE = ModelConfig(vocab_size=204, n_layer=24, d_model=1024, d_head=128, d_inner=3072, dropout=0.15)
SMALL = ModelConfig(vocab_size=50, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, dropout=0.0)
WT103_WORDS = 267_735
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


def wt103(vocab_size: int) -> ModelConfig:
    """Return WikiText-103's base model with untied softmax tables; with fewer words its cutoffs
    shrink in proportion."""
    config = recipes.load("wt103-base").model_config(WT103_WORDS)
    cutoffs = tuple(c * vocab_size // WT103_WORDS for c in config.cutoffs)
    return replace(config, vocab_size=vocab_size, cutoffs=cutoffs, tie_weight=False, tie_projs="none")


def words(batch: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Make words [batch, length], int64, always the same, with Zipf's frequencies in Mandelbrot's
    form, p ~ 1 / (word + 2.7), word 0 being the most frequent. The four bins of wt103-base get 78%,
    6%, 14% and 2% of them."""
    p = 1 / (torch.arange(vocab_size) + 2.7)
    drawn = torch.multinomial(p, batch * length, replacement=True, generator=torch.Generator().manual_seed(0))
    return drawn.view(batch, length).to(device)
