"""The vanilla Transformer language model that evaluation speed is compared with (paper, section 4.5 and Table 9)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.config import ModelConfig
from txl.model import FeedForward
from txl_kernels import sinusoid


class VanillaBlock(nn.Module):
    """Post-norm layer over one window: torch's scaled_dot_product_attention and the same feed-forward net."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        width = config.n_head * config.d_head
        self.qkv = nn.Linear(config.d_model, 3 * width, bias=False)
        self.out = nn.Linear(width, config.d_model, bias=False)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.qkv(hidden).unflatten(-1, (3, self.n_head, self.d_head)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = self.attention_norm(hidden + self.out(attended.transpose(1, 2).flatten(-2)))
        result: Tensor = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return result


class VanillaTransformer(nn.Module):
    """Absolute sinusoidal positions, no memory: each prediction reads its whole window anew.

    Evaluated as Al-Rfou et al. (2018) do, by a window that slides one token at a time, one prediction a forward pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(VanillaBlock(config) for _ in range(config.n_layer))

    def predict(self, window: Tensor) -> Tensor:
        """Logits [B, vocab_size] of the token after a window [B, W]."""
        places = torch.arange(window.size(1), device=window.device)
        hidden = self.embedding(window) * self.config.d_model**0.5 + sinusoid(places, self.config.d_model)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden[:, -1], self.embedding.weight)
