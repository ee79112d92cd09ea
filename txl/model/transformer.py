"""The language models of the paper: embeddings, layers with memory, softmax."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl.errors import TxlError
from txl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, init_parameters
from txl.model.attention import Biases, make_attention
from txl.model.config import ModelConfig, NetworkConfig
from txl_kernels import KeyValueCache, RelAttention, sinusoid
from txl_kernels.cache import unchanged_on_error
from txl_kernels.layer import SegmentAttention
from txl_kernels.linear import project

# The last inputs of each layer, detached: n_layer tensors [B, M, d_model], M <= mem_len.
HiddenMemory = tuple[Tensor, ...]


class States(NamedTuple):
    """The outputs of a model for a segment.

    Attributes:
        hidden: [B, L, d_model], the input of the softmax.
        memory: the memory for the next segment; None without recurrence.
        inputs: the input of each layer, [B, L, d_model]; the first is the embeddings.
        layers: the output of each layer, [B, L, d_model].
    """

    hidden: Tensor
    memory: HiddenMemory | None
    inputs: list[Tensor]
    layers: list[Tensor]


def check_tokens(tokens: Tensor) -> None:
    """Raise ValueError unless tokens are [B, L] with L >= 1."""
    if tokens.dim() != 2 or tokens.size(1) == 0:
        raise ValueError(f"tokens must be [B, L] with L >= 1, got shape {list(tokens.shape)}")


def remember(past: Tensor | None, hidden: Tensor, mem_len: int, ext_len: int = 0) -> Tensor:
    """Return the last mem_len states [B, M, d_model] of memory and segment, detached (h tilde in
    the paper), in the dtype of `past`.

    ext_len: states to leave out at the segment's end, because the next segment begins with these
    positions and computes them again. (The released code swaps two lengths here and keeps some
    states twice.)
    """
    new = hidden[:, : max(hidden.size(1) - ext_len, 0)].detach()
    if past is None or new.size(1) >= mem_len:
        return new[:, max(new.size(1) - mem_len, 0) :]
    keep = min(past.size(1), mem_len - new.size(1))
    return torch.cat([past[:, past.size(1) - keep :], new.to(past.dtype)], 1)


class VariationalDropout(nn.Dropout1d):
    """Dropout of [B, L, d] with a mask [B, 1, d] that is the same at all positions of a segment."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mT).mT


def hidden_dropout(config: NetworkConfig, p: float | None = None) -> nn.Module:
    """Make the dropout of hidden states [B, L, d] with rate p; None for config.dropout."""
    p = config.dropout if p is None else p
    return VariationalDropout(p) if config.variational_dropout else nn.Dropout(p)


class FeedForward(nn.Sequential):
    """Position-wise feed-forward net: d_model -> d_inner -> d_model with ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(),
            hidden_dropout(config),
            nn.Linear(config.d_inner, config.d_model),
            hidden_dropout(config),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for module in self:
            hidden = project(module, hidden) if isinstance(module, nn.Linear) else module(hidden)
        return hidden


class Block(nn.Module):
    """A layer: attention and feed-forward net, each with a residual connection and a layer norm.

    Attributes:
        recompute: whether backward recomputes the layer instead of storing its activations.
        places: [table_len, d_model], learned positions added to this layer's input, or None.
    """

    def __init__(self, config: ModelConfig, biases: Biases | None) -> None:
        super().__init__()
        self.pre_norm, self.recompute = config.pre_norm, False
        self.attention = make_attention(config, biases)
        self.places: nn.Parameter | None = None
        if config.encoding == "learned":
            assert config.table_len is not None
            self.places = nn.Parameter(torch.zeros(config.table_len, config.d_model))
        self.dropout = hidden_dropout(config)
        self.attention_norm = nn.LayerNorm(config.d_model, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, config.norm_eps)

    def place(self, hidden: Tensor) -> Tensor:
        """Return the layer's input [B, L, d_model] with its learned positions added, if it has any.

        Raises:
            TxlError: the segment is longer than the table of positions.
        """
        if self.places is None:
            return hidden
        if hidden.size(1) > self.places.size(0):
            raise TxlError(
                f"a segment of {hidden.size(1)} tokens is beyond the model's {self.places.size(0)} learned positions "
                "(table_len)"
            )
        return hidden + self.places[: hidden.size(1)]

    def attention_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the attention's projections for hidden states, those of the segment
        and those of the memory alike."""
        normed: Tensor = self.attention_norm(hidden) if self.pre_norm else hidden
        return normed

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from its input and the attention's output, both [B, L,
        d_model]."""
        hidden = hidden + self.dropout(attended)
        if self.pre_norm:
            result: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        else:
            hidden = self.attention_norm(hidden)
            result = self.feed_forward_norm(hidden + self.feed_forward(hidden))
        return result

    def forward(self, hidden: Tensor, memory: Tensor | None, positions: Tensor | None) -> Tensor:
        """Compute the layer's output [B, L, d_model] from hidden [B, L, d_model] and memory [B, M,
        d_model].

        positions: encodings [M + L, d_model] shared by the layers; None if the layer has its own or
        none.
        """
        if self.recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._forward, hidden, memory, positions, use_reentrant=False)
            return recomputed
        return self._forward(hidden, memory, positions)

    def _forward(self, hidden: Tensor, memory: Tensor | None, positions: Tensor | None) -> Tensor:
        past = None if memory is None else self.attention_input(memory)
        if positions is None:
            attended = self.attention(self.attention_input(hidden), past)
        else:
            attended = self.attention(self.attention_input(hidden), past, positions=positions)
        return self.after_attention(hidden, attended)


class LanguageNetwork(nn.Module):
    """The interface that `TransformerXL` and `RecurrentNetwork` share.

    Attributes:
        softmax: log-probabilities and losses of hidden states.
    """

    if TYPE_CHECKING:  # torch.jit.trace of a model with @torch.jit.export takes them for TorchScript's
        embedding: AdaptiveEmbedding
        softmax: AdaptiveSoftmax
        read: Callable[..., States]

    @property
    @torch.jit.unused
    def device(self) -> torch.device:
        device: torch.device = self.embedding.tables[0].device
        return device

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores [.., vocab_size] of the next token from [.., d_model]; see
        `AdaptiveSoftmax.logits`."""
        return self.softmax.logits(hidden)

    def forward(self, tokens: Tensor, memory: HiddenMemory | None = None) -> tuple[Tensor, HiddenMemory | None]:
        """Compute scores of the token after each position; arguments and errors as in `read`.

        Returns:
            Scores [B, L, vocab_size] (see `logits`) and the memory for the next segment, None if
            mem_len is 0.
        """
        states = self.read(tokens, memory)
        return self.logits(states.hidden), states.memory


class Trunk(nn.Module):
    """The network without its softmax: tokens to hidden states. Memory is an argument and a result.

    Parameters are not initialized here: a subclass that adds a softmax does it.
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
        super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]  # `to_empty` unties the layers' biases
        self.tie_biases()
        return self

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        result = super().load_state_dict(*arguments, **options)  # load_state_dict(assign=True) also unties the biases
        self.tie_biases()
        return result

    def tie_biases(self) -> None:
        """Share the first layer's u and v among all layers, if the configuration ties them."""
        if self.config.encoding != "relative" or self.config.untie_r:
            return
        first = self.layers[0].attention
        for block in self.layers[1:]:
            block.attention.content_bias = first.content_bias
            block.attention.position_bias = first.position_bias

    @property
    @torch.jit.unused
    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def initial_memory(self, batch: int, mem_len: int | None = None) -> tuple[Tensor, ...] | None:
        """Return the memory at the start of a text: None, or zero states for each layer
        (`ModelConfig.initial_memory`).

        mem_len: number of states; None for the configuration's.
        """
        c = self.config
        mem_len = c.mem_len if mem_len is None else mem_len
        if c.initial_memory == "empty" or mem_len == 0:
            return None
        return tuple(self.embedding.tables[0].new_zeros(batch, mem_len, c.d_model) for _ in range(c.n_layer))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens: [B, L] -> [B, L, d_model], scaled by sqrt(d_model), plus sinusoids for an
        encoding that adds them."""
        embedded: Tensor = self.embedding(tokens)
        if self.config.encoding == "sinusoid":
            places = torch.arange(tokens.size(1), device=tokens.device)
            embedded = embedded + sinusoid(places, self.config.d_model, embedded.dtype)
        return embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """Return the softmax's input [.., d_model] from the last layer's output [.., d_model]."""
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
        """Compute the hidden states of a segment, given the memory of the segments before it.

        Args:
            tokens: [B, L], integers below vocab_size; or their embeddings [B, L, d_model], as
                `embed` returns them.
            memory: the memory returned for the previous segment; None at the start of a text.
            mem_len: number of states to keep as memory; None for the configuration's.
            ext_len: tokens at the segment's end with which the next segment begins again.
            last: number of final positions to return states for; None for all L. The last layer
                computes only these.

        Raises:
            ValueError: tokens is not [B, L] with L >= 1, or memory has another batch size or number
                of layers.
        """
        if tokens.is_floating_point():
            embedded = tokens
        else:
            check_tokens(tokens)
            embedded = self.embed(tokens)
        c = self.config
        mem_len = c.mem_len if mem_len is None else mem_len
        if memory is None:
            memory = self.initial_memory(embedded.size(0), mem_len)
        if memory is not None and (len(memory) != c.n_layer or memory[0].size(0) != embedded.size(0)):
            raise ValueError(
                f"memory must be {c.n_layer} tensors for a batch of {embedded.size(0)}, got {len(memory)} for "
                f"{memory[0].size(0) if memory else 0}"
            )
        positions = self._positions(embedded, 0 if memory is None else memory[0].size(1))
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
                past = before if past is None else torch.cat([past, before], 1)
                hidden = hidden[:, -last:]
            hidden = block(hidden, past, positions)
            layers.append(hidden)
        return States(self.finish(hidden), tuple(kept) if mem_len else None, inputs, layers)

    def begin(self, caches: Sequence[KeyValueCache], memory: Sequence[Tensor] | None) -> None:
        """Reset each layer's cache to the start of a text.

        memory: hidden states [B, M, d_model] for each layer that precede it, as of
        `initial_memory`, or None.
        """
        for i, (block, cache) in enumerate(zip(self.layers, caches, strict=True)):
            cache.clear()
            if memory is not None:
                assert isinstance(block.attention, SegmentAttention)
                block.attention.fill_cache(cache, block.attention_input(memory[i]))

    def read_cached(self, embedded: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """Return hidden states as `read` does, taking a layer's keys and values from its
        cache and appending the new ones, unless the call fails. For evaluation with relative
        positions."""
        hidden = embedded
        with unchanged_on_error(caches):
            for block, cache in zip(self.layers, caches, strict=True):
                hidden = block.after_attention(hidden, block.attention(block.attention_input(hidden), cache=cache))
            return self.finish(hidden)

    def _positions(self, embedded: Tensor, memory_len: int) -> Tensor | None:
        """Return the encodings of distances shared by the layers; None if layers have their own or
        none."""
        attention = self.layers[0].attention
        if not isinstance(attention, RelAttention):
            return None
        dropped: Tensor = self.position_dropout(attention.positions(embedded.size(1), memory_len, like=embedded))
        return dropped


class TransformerXL(Trunk, LanguageNetwork):
    """The language model. Memory is an argument and a result of `forward`.

    `ModelConfig` selects the paper's variants. For evaluation and generation use `txl.Engine`,
    which caches keys and values (relative positions only).

    Attributes:
        second_softmax: the softmax for the token after the next (`ModelConfig.second_target`), or
            None.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.softmax = AdaptiveSoftmax(config, self.embedding)
        self.second_softmax = AdaptiveSoftmax(config, None) if config.second_target else None
        init_parameters(self, config)


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())
