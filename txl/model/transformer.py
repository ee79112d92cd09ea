"""The Transformer-XL language model (paper, section 3), with memory passed in and handed back."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl.model.config import ModelConfig
from txl_kernels import RelAttention

# The hidden states each layer read last, n_layer tensors [B, M, d_model], M <= mem_len. Detached.
HiddenMemory = tuple[Tensor, ...]


class FeedForward(nn.Sequential):
    """Position-wise: d_model -> d_inner -> d_model with ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )


class Block(nn.Module):
    """One layer: attention over memory and segment, then the feed-forward net.

    Each has its residual and layer norm.
    """

    def __init__(
        self, config: ModelConfig, content_bias: nn.Parameter | None, position_bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = RelAttention(
            config.d_model,
            config.n_head,
            config.d_head,
            attn_dropout=config.attn_dropout,
            window=config.window,
            clamp_len=config.clamp_len,
            content_bias=content_bias,
            position_bias=position_bias,
        )
        self.dropout = nn.Dropout(config.dropout)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model)

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

    def forward(self, hidden: Tensor, memory: Tensor | None, positions: Tensor) -> Tensor:
        """[B, L, d_model] with memory [B, M, d_model] and encodings [M + L, d_model]."""
        if memory is not None:
            memory = self.attention_input(memory)
        attended = self.attention(self.attention_input(hidden), memory, positions=positions)
        return self.after_attention(hidden, attended)


class TransformerXL(nn.Module):
    """Language model; state is explicit: memory goes in, memory comes out.

    Input and output embeddings are tied. For evaluation and generation use `txl.Engine`, which
    caches keys and values.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shared: list[nn.Parameter | None] = [None, None]
        if not config.untie_r:
            shared = [nn.Parameter(torch.empty(config.n_head, config.d_head)) for _ in range(2)]
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, *shared) for _ in range(config.n_layer))
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._init_parameters()

    def _init_parameters(self) -> None:
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, RelAttention):
                nn.init.normal_(module.content_bias, 0.0, std)
                nn.init.normal_(module.position_bias, 0.0, std)

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def initial_memory(self, batch: int) -> HiddenMemory | None:
        """What precedes a text: None, or mem_len zero states a layer.

        See `ModelConfig.initial_memory`.
        """
        c = self.config
        if c.initial_memory == "empty" or c.mem_len == 0:
            return None
        return tuple(self.embedding.weight.new_zeros(batch, c.mem_len, c.d_model) for _ in range(c.n_layer))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] -> [B, L, d_model], scaled by sqrt(d_model)."""
        embedded: Tensor = self.embedding(tokens) * math.sqrt(self.config.d_model)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, L, d_model] -> [B, L, vocab_size]."""
        return F.linear(hidden, self.embedding.weight, self.output_bias)

    def forward(self, tokens: Tensor, memory: HiddenMemory | None = None) -> tuple[Tensor, HiddenMemory | None]:
        """Scores of the token after each position.

        Args:
            tokens: [B, L], integers below vocab_size.
            memory: what the call for the segment before returned; None at the start of a text.

        Returns:
            logits [B, L, vocab_size], and the memory for the segment that follows, None if mem_len
            is 0.

        Raises:
            ValueError: tokens is not [B, L] with L >= 1, or memory is of another batch or model.
        """
        c = self.config
        if tokens.dim() != 2 or tokens.size(1) == 0:
            raise ValueError(f"tokens must be [B, L] with L >= 1, got shape {list(tokens.shape)}")
        if memory is None:
            memory = self.initial_memory(tokens.size(0))
        if memory is not None and (len(memory) != c.n_layer or memory[0].size(0) != tokens.size(0)):
            raise ValueError(
                f"memory must be {c.n_layer} tensors for a batch of {tokens.size(0)}, got {len(memory)} for "
                f"{memory[0].size(0) if memory else 0}"
            )
        held = 0 if memory is None else memory[0].size(1)
        positions = self.dropout(self.layers[0].attention.positions(tokens.size(1), held))
        hidden = self.dropout(self.embed(tokens))
        kept = []
        for i, block in enumerate(self.blocks):
            past = None if memory is None else memory[i]
            kept.append(self._remember(past, hidden))
            hidden = block(hidden, past, positions)
        return self.logits(self.dropout(hidden)), tuple(kept) if c.mem_len else None

    def _remember(self, past: Tensor | None, hidden: Tensor) -> Tensor:
        """The last mem_len states of memory and segment, detached (paper, equation for h tilde)."""
        mem_len = self.config.mem_len
        if past is None or hidden.size(1) >= mem_len:
            return hidden[:, max(hidden.size(1) - mem_len, 0) :].detach()
        keep = min(past.size(1), mem_len - hidden.size(1))
        return torch.cat([past[:, past.size(1) - keep :], hidden.detach()], 1)


def count_parameters(model: nn.Module) -> int:
    """Each shared parameter once."""
    return sum(p.numel() for p in model.parameters())
