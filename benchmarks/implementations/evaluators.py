"""Transformer-XL evaluated segment by segment, by txl and by the original algorithm, with the
same weights; and the vanilla model of Al-Rfou et al., whose window moves by one token, in
several implementations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.comparison import require
from implementations.attention import compiler
from implementations.models import MAX_ERROR, SMALL, Named, small
from implementations.original import OriginalTransformerXL, original_absolute_qkbh
from txl import Engine, ModelConfig, TransformerXL, graphs

# Makes, of a model, batch, attn_len and max_segment, a reader of a text segment by segment: tokens
# [B, L] -> logits [B, L, vocab_size] of the tokens that follow. Each token sees exactly the last
# attn_len positions, its own included. remember(states) sets the memory as if states
# [B, M, d_model] had been the last hidden states of every layer.
MakeEvaluator = Callable[[TransformerXL, int, int, int], Any]


class CachedEvaluator(Engine):
    """txl's evaluation with cached keys and values."""

    def remember(self, states: Tensor) -> None:
        self.fill([states] * len(self.caches))


class EagerEvaluator(CachedEvaluator):
    """The same without CUDA graphs."""

    def __init__(self, model: TransformerXL, batch: int, attn_len: int, max_segment: int) -> None:
        super().__init__(model, batch, attn_len, max_segment, graph=False)


class OriginalEvaluator:
    """The original algorithm: a memory of hidden states, whose keys and values are projected again
    for each segment."""

    def __init__(self, model: TransformerXL, batch: int, attn_len: int, max_segment: int) -> None:
        self.model = OriginalTransformerXL(model, attn_len - 1, attn_len).eval()
        self.memory: list[Tensor] | None = None

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.memory = self.model(tokens, self.memory)
        return logits

    def remember(self, states: Tensor) -> None:
        kept = states[:, -self.model.mem_len :].transpose(0, 1).contiguous()
        self.memory = [kept] * len(self.model.model.layers)


OURS, OURS_EAGER, ORIGINAL = "rel_attention", "rel_attention-eager", "original"
EVALUATORS = {
    OURS: Named("ours, cached keys and values", "ours", CachedEvaluator),
    OURS_EAGER: Named("ours, cached keys and values, without CUDA graphs", "part", EagerEvaluator),
    ORIGINAL: Named("Transformer-XL, original algorithm", "other", OriginalEvaluator),
}


def check_evaluator(make: MakeEvaluator, dtype: torch.dtype, device: torch.device) -> None:
    """Check the logits against one float64 pass over the whole text with a window of attn_len
    keys."""
    model, exact, tokens = small(dtype, device)
    attn_len, segment = 23, 12
    evaluator = make(model, 2, attn_len, segment)
    got = torch.cat([evaluator(part) for part in tokens.split(segment, 1)], 1)
    assert got.shape == (*tokens.shape, SMALL.vocab_size)
    for block in exact.layers:
        block.attention.window = attn_len
    with torch.inference_mode():
        require(got, exact(tokens)[0], "logits", MAX_ERROR[dtype])


def operations(config: ModelConfig, attn_len: int) -> float:
    """Return the useful operations per token of Transformer-XL with cached keys and values."""
    return _outside(config) + config.n_layer * 6.0 * attn_len * config.n_head * config.d_head


def vanilla_operations(config: ModelConfig, algorithm: str, attn_len: int) -> float:
    """Return the useful operations per token of a vanilla model, which recomputes its window."""
    width = config.n_head * config.d_head
    attention = 2.0 * attn_len * attn_len * width  # operations of a layer: 2 products over the causal pairs
    softmax = 2.0 * config.d_model * config.vocab_size
    layer = (_outside(config) - softmax) / config.n_layer
    if "-last" not in algorithm:
        return config.n_layer * (attn_len * layer + attention) + softmax
    # keys and values of all positions
    last = layer + 4.0 * (attn_len - 1) * config.d_model * width + 4.0 * attn_len * width
    return (config.n_layer - 1) * (attn_len * layer + attention) + last + softmax


def _outside(config: ModelConfig) -> float:
    """Return the operations per token outside attention: projections, feed-forward nets,
    softmax."""
    layer = 4 * config.d_model * config.n_head * config.d_head + 2 * config.d_model * config.d_inner
    return 2.0 * (config.n_layer * layer + config.d_model * config.vocab_size)


# Title of each algorithm.
VANILLA = {
    "vanilla-eager": "vanilla, eager as published",
    "vanilla-flash": "vanilla, flash SDPA",
    "vanilla-flash-last": "vanilla, flash SDPA, top layer for the last token alone",
    "vanilla-last": "vanilla, compiled, top layer for the last token alone",
    "vanilla-eager-graph": "vanilla, as published, in a CUDA graph",
    "vanilla-flash-graph": "vanilla, flash SDPA, in a CUDA graph",
    "vanilla-flash-last-graph": "vanilla, flash SDPA, top layer for the last token alone, in a CUDA graph",
}


def vanilla(model: TransformerXL, algorithm: str) -> Callable[[Tensor], Tensor]:
    """Make an untrained vanilla model of these sizes, with sinusoids added to the embeddings and no
    memory; return predict(window [B, W]) -> logits [B, vocab_size].

    algorithm: "vanilla-eager": full scores in the original's layout; "vanilla-flash": torch's fused
    attention; "..-last": the last layer computes only the last token; "vanilla-last": each layer is
    under torch.compile, which multiplies by MKL; "..-graph": replayed as a CUDA graph.
    """
    algorithm, in_graph = algorithm.removesuffix("-graph"), algorithm.endswith("-graph")
    torch.manual_seed(1)
    # Weights that every dtype represents exactly, so that models of two dtypes are equal.
    config = dataclasses.replace(
        model.config, encoding="sinusoid", mem_len=0, table_len=None, window=None, clamp_len=None, untie_r=False,
        pre_norm=False, final_norm=False,
    )  # fmt: skip
    it = TransformerXL(config).bfloat16().to(model.device, model.softmax.bias.dtype).eval()
    if algorithm == "vanilla-eager":
        for block in it.layers:
            block.attention.attend = _eager_attend
    if algorithm == "vanilla-last":
        compiler()
        for block in it.layers:
            block.compile(dynamic=True)
    last = 1 if algorithm.endswith("-last") else None

    @torch.inference_mode()
    def predict(window: Tensor) -> Tensor:
        return it.logits(it.read(window, mem_len=0, last=last).hidden[:, -1])

    captured: list[graphs.Captured[Tensor]] = []

    @torch.inference_mode()
    def replay(window: Tensor) -> Tensor:
        if not captured:
            predict(window)
            captured.append(graphs.Captured(predict, [window.clone()]))
        return captured[0](window)

    return replay if in_graph else predict


def _eager_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
    return original_absolute_qkbh(q, k, v).permute(1, 2, 0, 3)


def check_vanilla(algorithm: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check a vanilla model's logits against the eager one's in float64."""
    model, exact, tokens = small(dtype, device)
    require(vanilla(model, algorithm)(tokens), vanilla(exact, "vanilla-eager")(tokens), "logits", MAX_ERROR[dtype])
