"""One layer of a model: attention over memory and segment, then the feed-forward net."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl.errors import TxlError
from txl.model.absolute import AbsoluteAttention
from txl.model.config import PLACES, ModelConfig
from txl.model.dropout import hidden_dropout
from txl.model.memory import Remembered, on_device
from txl.model.shaw import ReleasedShawAttention, ShawAttention
from txl_kernels import RelAttention
from txl_kernels.layer import SegmentAttention

Biases = tuple[nn.Parameter, nn.Parameter]  # u and v of the paper, shared by all layers


class FeedForward(nn.Sequential):
    """Position-wise: d_model -> d_inner -> d_model with ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(),
            hidden_dropout(config),
            nn.Linear(config.d_inner, config.d_model),
            hidden_dropout(config),
        )


def make_attention(config: ModelConfig, biases: Biases | None) -> SegmentAttention | AbsoluteAttention:
    """The attention of a layer with the encoding that config names."""
    sizes = (config.d_model, config.n_head, config.d_head)
    if config.absolute:
        return AbsoluteAttention(*sizes, attn_dropout=config.attn_dropout, window=config.window)
    if config.encoding == "relative":
        content_bias, position_bias = biases if biases is not None else (None, None)
        return RelAttention(
            *sizes, attn_dropout=config.attn_dropout, window=config.window, clamp_len=config.clamp_len,
            content_bias=content_bias, position_bias=position_bias,
        )  # fmt: skip
    assert config.table_len is not None
    kind = ShawAttention if config.encoding == "shaw" else ReleasedShawAttention
    return kind(*sizes, config.table_len, attn_dropout=config.attn_dropout, window=config.window)


class Block(nn.Module):
    """Attention and feed-forward net, each with its residual and layer norm.

    Attributes:
        recompute: whether backward computes the layer anew instead of keeping what it made.
        places: [table_len, d_model], what a learned place adds to this layer's input; else None.
    """

    def __init__(self, config: ModelConfig, biases: Biases | None) -> None:
        super().__init__()
        self.pre_norm, self.recompute = config.pre_norm, False
        self.attention = make_attention(config, biases)
        self.places: nn.Parameter | None = None
        self.last_rows = config.encoding == "learned-released"  # of places, for a short segment
        self.raw_queries = config.raw_queries
        if config.encoding in PLACES:
            assert config.table_len is not None
            self.places = nn.Parameter(torch.zeros(config.table_len, config.d_model))
        self.dropout = hidden_dropout(config)
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def place(self, hidden: Tensor) -> Tensor:
        """The layer's input with its learned positions, if it has any.

        Raises:
            TxlError: the segment is longer than the table.
        """
        if self.places is None:
            return hidden
        if hidden.size(1) > self.places.size(0):
            raise TxlError(
                f"a segment of {hidden.size(1)} tokens is beyond the model's {self.places.size(0)} learned positions "
                "(table_len)"
            )
        first = self.places.size(0) - hidden.size(1) if self.last_rows else 0
        return hidden + self.places[first : first + hidden.size(1)]

    def attention_input(self, hidden: Tensor) -> Tensor:
        """What the projections see of hidden states, of the segment and of the memory alike."""
        normed: Tensor = self.attention_norm(hidden) if self.pre_norm else hidden
        return normed

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer; both [B, L, d_model]."""
        hidden = hidden + self.dropout(attended)
        if self.pre_norm:
            result: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        else:
            hidden = self.attention_norm(hidden)
            result = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return result

    def forward(self, hidden: Tensor, memory: Remembered | None, positions: Tensor | None) -> Tensor:
        """[B, L, d_model] with memory [B, M, d_model].

        positions: encodings [M + L, d_model] shared by the layers; None for what the layer has.
        """
        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._forward, hidden, memory, positions, use_reentrant=False)
            return recomputed
        return self._forward(hidden, memory, positions)

    def _forward(self, hidden: Tensor, memory: Remembered | None, positions: Tensor | None) -> Tensor:
        past = None if memory is None else self.attention_input(on_device(memory))
        if self.raw_queries:
            attended = self.attention(self.attention_input(hidden), past, queries=hidden)
        elif positions is None:
            attended = self.attention(self.attention_input(hidden), past)
        else:
            attended = self.attention(self.attention_input(hidden), past, positions=positions)
        return self.after_attention(hidden, attended)
