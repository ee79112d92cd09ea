"""The vanilla Transformer that evaluation speed is compared with (paper, section 4.5, Table 9)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.model.config import ModelConfig
from txl.model.transformer import FeedForward
from txl_kernels import sinusoid


def causal_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's fused attention; [B, H, W, D] each."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class VanillaBlock(nn.Module):
    """Post-norm layer over one window, with the same feed-forward net as ours.

    Attributes:
        attend: causal attention of q, k, v [B, H, W, D] each.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        width = config.n_head * config.d_head
        self.qkv = nn.Linear(config.d_model, 3 * width, bias=False)
        self.out = nn.Linear(width, config.d_model, bias=False)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)
        self.attend = causal_flash

    def forward(self, hidden: Tensor, last_only: bool = False) -> Tensor:
        """[B, W, d_model] -> the same; with `last_only` the last position, [B, 1, d_model]."""
        if last_only:
            width = self.n_head * self.d_head
            q = F.linear(hidden[:, -1:], self.qkv.weight[:width])
            k, v = F.linear(hidden, self.qkv.weight[width:]).split(width, -1)
            heads = (x.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2) for x in (q, k, v))
            # The last sees all, so no mask is needed.
            attended, hidden = F.scaled_dot_product_attention(*heads), hidden[:, -1:]
        else:
            parts = self.qkv(hidden).unflatten(-1, (3, self.n_head, self.d_head)).permute(2, 0, 3, 1, 4)
            attended = self.attend(parts[0], parts[1], parts[2])
        hidden = self.attention_norm(hidden + self.out(attended.transpose(1, 2).flatten(-2)))
        result: Tensor = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return result


class VanillaTransformer(nn.Module):
    """Absolute sinusoidal positions, no memory: each prediction reads its whole window anew.

    Evaluated as Al-Rfou et al. (2018) do: the window slides one token at a time, one prediction a
    forward pass.

    Attributes:
        last_layer_in_full: False leaves out of the last layer what one prediction does not need.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(VanillaBlock(config) for _ in range(config.n_layer))
        self.last_layer_in_full = True

    @property
    def layers(self) -> list[VanillaBlock]:
        return [block for block in self.blocks if isinstance(block, VanillaBlock)]

    def predict(self, window: Tensor) -> Tensor:
        """Logits [B, vocab_size] of the token after a window [B, W]."""
        places = torch.arange(window.size(1), device=window.device)
        positions = sinusoid(places, self.config.d_model, self.embedding.weight.dtype)
        hidden = self.embedding(window) * self.config.d_model**0.5 + positions
        for block in self.blocks[:-1]:
            hidden = block(hidden)
        hidden = self.blocks[-1](hidden, last_only=not self.last_layer_in_full)
        return F.linear(hidden[:, -1], self.embedding.weight)
