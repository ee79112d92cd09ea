"""The paper's model sizes, and the small model that whole models are checked on."""

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
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # relative error of its logits, after two layers


class Named(NamedTuple):
    """A way to train or evaluate a model: its name, its role, and how it is made."""

    name: str
    role: Role
    make: Callable[..., Any]


@functools.cache
def small(dtype: torch.dtype, device: torch.device) -> tuple[TransformerXL, TransformerXL, Tensor]:
    """A small model of lively weights, the same in float64 on the reference backend, and a text [2,
    60]."""
    torch.manual_seed(0)
    model, exact = (TransformerXL(SMALL) for _ in range(2))
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.2)
    model = model.to(dtype)
    exact.load_state_dict(model.state_dict())
    tokens = torch.randint(SMALL.vocab_size, (2, 60)).to(device)
    return model.to(device), exact.to(device).double(), tokens


def text(batch: int, length: int, device: torch.device) -> Tensor:
    """Tokens [batch, length] of the vocabulary of the paper's models."""
    return torch.randint(204, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)


def wt103(vocab_size: int) -> ModelConfig:
    """WikiText-103's base model with tables of the softmax's own; with fewer words its cutoffs
    shrink in proportion."""
    config = recipes.load("wt103-base").model_config(WT103_WORDS)
    cutoffs = tuple(c * vocab_size // WT103_WORDS for c in config.cutoffs)
    return replace(config, vocab_size=vocab_size, cutoffs=cutoffs, tie_weight=False, tie_projs="none")


def words(batch: int, length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Words [batch, length], int64, as often as Zipf's law in Mandelbrot's form has them:
    p ~ 1 / (word + 2.7), word 0 the most frequent, always the same. Of wt103-base's four bins they
    hit 78%, 6%, 14% and 2%."""
    p = 1 / (torch.arange(vocab_size) + 2.7)
    drawn = torch.multinomial(p, batch * length, replacement=True, generator=torch.Generator().manual_seed(0))
    return drawn.view(batch, length).to(device)
