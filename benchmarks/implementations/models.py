"""The paper's model sizes, and the small model that whole models are checked on."""

import functools

import torch
from torch import Tensor, nn

from txl import ModelConfig, TransformerXL

ENWIK8_BASE = ModelConfig(vocab_size=204)
ENWIK8_LARGE = ModelConfig(vocab_size=204, n_layer=24, d_model=1024, d_head=128, d_inner=3072, dropout=0.15)
SMALL = ModelConfig(vocab_size=50, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, dropout=0.0)
MOST = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # relative error of its logits, after two layers


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
