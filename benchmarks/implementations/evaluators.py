"""Transformer-XL evaluated segment by segment: ours, the original algorithm, and Hugging Face's, on
the same weights."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.checks import require
from harness.comparison import Role
from implementations.hugging_face import hugging_face, hugging_face_logits
from implementations.models import MOST, SMALL, small
from implementations.original_model import OriginalTransformerXL
from txl import Engine, TransformerXL


class Evaluator(Protocol):
    """Reads a text segment by segment: tokens [B, L] to the logits [B, L, vocab_size] of the tokens
    that follow.

    Every token sees exactly the last attn_len positions, itself included.
    """

    def __call__(self, tokens: Tensor) -> Tensor: ...

    def remember(self, states: Tensor) -> None:
        """Goes on as if states [B, M, d_model] had been every layer's hidden states so far."""


# make(model, batch, attn_len, max_segment)
MakeEvaluator = Callable[[TransformerXL, int, int, int], Evaluator]


class CachedEvaluator(Engine):
    """Ours."""

    @torch.inference_mode()
    def remember(self, states: Tensor) -> None:
        for block, cache in zip(self.model.layers, self.caches, strict=True):
            cache.clear()
            block.attention.fill_cache(cache, block.attention_input(states))


class OriginalEvaluator:
    """The original algorithm: memory of hidden states, everything projected anew for each
    segment."""

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


class HuggingFaceEvaluator:
    """transformers' TransfoXL with the same weights; same_length, so that a token sees mem_len
    keys."""

    def __init__(self, model: TransformerXL, batch: int, attn_len: int, max_segment: int) -> None:
        self.model = hugging_face(model, mem_len=attn_len, same_length=True).eval()
        empty = model.softmax.bias.new_zeros(0, batch, model.config.d_model)  # None would be zeros, attended
        self.memory: list[Tensor] = [empty] * model.config.n_layer

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        logits, self.memory = hugging_face_logits(self.model, tokens, self.memory)
        return logits

    def remember(self, states: Tensor) -> None:
        self.memory = [states.transpose(0, 1).contiguous()] * len(self.memory)


class Named(NamedTuple):
    """An evaluator: its name, its role, and how it is made."""

    name: str
    role: Role
    make: MakeEvaluator


OURS, ORIGINAL, HUGGING_FACE = "rel_attention", "original", "hugging-face"
EVALUATORS = {
    OURS: Named("ours, cached keys and values", "ours", CachedEvaluator),
    ORIGINAL: Named("Transformer-XL, original algorithm", "other", OriginalEvaluator),
    HUGGING_FACE: Named("Transformer-XL, Hugging Face", "other", HuggingFaceEvaluator),
}


def check_evaluator(make: MakeEvaluator, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses what gives other logits than one float64 pass over the whole text in which a token
    sees attn_len keys."""
    model, exact, tokens = small(dtype, device)
    attn_len, segment = 23, 12
    evaluator = make(model, 2, attn_len, segment)
    got = torch.cat([evaluator(part) for part in tokens.split(segment, 1)], 1)
    assert got.shape == (*tokens.shape, SMALL.vocab_size)
    for block in exact.layers:
        block.attention.window = attn_len
    with torch.inference_mode():
        require(got, exact(tokens)[0], "logits", MOST[dtype])
