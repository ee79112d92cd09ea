"""Embeddings and layers with memory: all of a language model but its softmax."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from txl.model.block import Biases, Block
from txl.model.config import ModelConfig
from txl.model.dropout import hidden_dropout
from txl.model.embedding import AdaptiveEmbedding
from txl.model.memory import HiddenMemory, on_device, remember
from txl_kernels import KeyValueCache, RelAttention, sinusoid
from txl_kernels.layer import SegmentAttention


class States(NamedTuple):
    """What a model made of a segment.

    Attributes:
        hidden: [B, L, d_model], what the softmax takes.
        memory: for the segment that follows; None without recurrence.
        inputs: what each layer got, [B, L, d_model]; the first the embeddings.
        layers: the output of each layer, [B, L, d_model].
    """

    hidden: Tensor
    memory: HiddenMemory | None
    inputs: list[Tensor]
    layers: list[Tensor]


def check_tokens(tokens: Tensor) -> None:
    """Raises ValueError unless they are [B, L] with L >= 1."""
    if tokens.dim() != 2 or tokens.size(1) == 0:
        raise ValueError(f"tokens must be [B, L] with L >= 1, got shape {list(tokens.shape)}")


class Trunk(nn.Module):
    """Tokens to hidden states; state is explicit: memory goes in, memory comes out.

    Parameters are left as they are allocated: who adds a softmax draws them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        biases: Biases | None = None
        if config.encoding == "relative" and not config.untie_r:
            shape = (config.n_head, config.d_head)
            biases = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.embedding = AdaptiveEmbedding(config)
        self.embedding_dropout = hidden_dropout(config, config.embedding_dropout)
        self.position_dropout = nn.Dropout(0.0 if config.variational_dropout else config.dropout)
        self.blocks = nn.ModuleList(Block(config, biases) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.d_model, config.norm_eps) if config.final_norm else nn.Identity()
        self.output_dropout = hidden_dropout(config, config.output_dropout)

    def _apply(self, *arguments: Any, **options: Any) -> "Trunk":
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]  # `to_empty` makes each layer a tensor of its own
        self.tie_biases()
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        result = super().load_state_dict(*arguments, **options)  # so does assign=True
        self.tie_biases()
        return result

    def tie_biases(self) -> None:
        """u and v are the first layer's in all, where the configuration ties them."""
        if self.config.encoding != "relative" or self.config.untie_r:
            return
        first = self.layers[0].attention
        for block in self.layers[1:]:
            block.attention.content_bias = first.content_bias
            block.attention.position_bias = first.position_bias

    @property
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.tables[0].device
        return device

    def initial_memory(self, batch: int, mem_len: int | None = None) -> tuple[Tensor, ...] | None:
        """What precedes a text: None, or zero states in each layer (`ModelConfig.initial_memory`).

        mem_len: how many; None for the configuration's.
        """
        c = self.config
        mem_len = c.mem_len if mem_len is None else mem_len
        if c.initial_memory == "empty" or mem_len == 0:
            return None
        return tuple(self.embedding.tables[0].new_zeros(batch, mem_len, c.d_model) for _ in range(c.n_layer))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, L] -> [B, L, d_model], scaled by sqrt(d_model); plus sinusoids if so encoded."""
        embedded: Tensor = self.embedding(tokens)
        if self.config.encoding in ("sinusoid", "sinusoid-released"):
            places = torch.arange(tokens.size(1), device=tokens.device)
            if self.config.encoding == "sinusoid-released":
                places = places.flip(0)
            embedded = embedded + sinusoid(places, self.config.d_model, embedded.dtype)
        return embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """The last layer's output [.., d_model] -> what the softmax takes."""
        finished: Tensor = self.output_dropout(self.final_norm(hidden))
        return finished

    def read(
        self,
        tokens: Tensor,
        memory: HiddenMemory | None = None,
        *,
        mem_len: int | None = None,
        ext_len: int = 0,
        last: int | None = None,
    ) -> States:
        """Reads a segment after a memory.

        Args:
            tokens: [B, L], integers below vocab_size.
            memory: what the call for the segment before returned; None at the start of a text.
            mem_len: states to remember; None for the configuration's.
            ext_len: tokens at the segment's end that the next segment begins with.
            last: states wanted; None for all L. The last layer computes no others.

        Raises:
            ValueError: tokens is not [B, L] with L >= 1, or memory is of another batch or model.
        """
        check_tokens(tokens)
        return self.read_embedded(self.embed(tokens), memory, mem_len=mem_len, ext_len=ext_len, last=last)

    def read_embedded(
        self,
        embedded: Tensor,
        memory: HiddenMemory | None = None,
        *,
        mem_len: int | None = None,
        ext_len: int = 0,
        last: int | None = None,
    ) -> States:
        """As `read`, of embeddings [B, L, d_model] as `embed` gives them."""
        c = self.config
        mem_len = c.mem_len if mem_len is None else mem_len
        if memory is None:
            memory = self.initial_memory(embedded.size(0), mem_len)
        if memory is not None and (len(memory) != c.n_layer or memory[0].size(0) != embedded.size(0)):
            raise ValueError(
                f"memory must be {c.n_layer} tensors for a batch of {embedded.size(0)}, got {len(memory)} for "
                f"{memory[0].size(0) if memory else 0}"
            )
        positions = self._positions(embedded.size(1), 0 if memory is None else memory[0].size(1))
        hidden = self.embedding_dropout(embedded)
        kept, inputs, layers = [], [], []
        for i, block in enumerate(self.layers):
            past = None if memory is None else memory[i]
            hidden = block.place(hidden)
            inputs.append(hidden)
            if mem_len:
                kept.append(remember(past, hidden, mem_len, ext_len))
            if last is not None and last < hidden.size(1) and block is self.blocks[-1]:
                before = hidden[:, :-last]
                past = before if past is None else torch.cat([on_device(past), before], 1)
                hidden = hidden[:, -last:]
            hidden = block(hidden, past, positions)
            layers.append(hidden)
        return States(self.finish(hidden), tuple(kept) if mem_len else None, inputs, layers)

    def begin(self, caches: Sequence[KeyValueCache]) -> None:
        """Puts each layer's cache at the start of a text: empty, or full of zero states."""
        zeros = self.initial_memory(caches[0].batch, caches[0].mem_len)
        for i, (block, cache) in enumerate(zip(self.layers, caches, strict=True)):
            cache.clear()
            if zeros is not None:
                assert isinstance(block.attention, SegmentAttention)
                block.attention.fill_cache(cache, block.attention_input(zeros[i]))

    def read_cached(self, embedded: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """As `read_embedded`'s hidden states, with a layer's keys and values from its cache, to
        which it adds; for evaluation, and relative positions."""
        hidden = embedded
        for block, cache in zip(self.layers, caches, strict=True):
            hidden = block.after_attention(hidden, block.attention(block.attention_input(hidden), cache=cache))
        return self.finish(hidden)

    def _positions(self, length: int, memory_len: int) -> Tensor | None:
        """Encodings of distances that the layers share; None where layers have their own."""
        attention = self.layers[0].attention
        if not isinstance(attention, RelAttention):
            return None
        dropped: Tensor = self.position_dropout(attention.positions(length, memory_len))
        return dropped
