"""Outputs of the models; and padding, which they read by rotating rows so that it comes last."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from txl.hf.cache import TransfoXLCache


def left_padding(mask: Tensor, embedded: Tensor) -> Tensor | None:
    """Zeros before each row's ones, int64 [B]; None for a mask of ones.

    Raises:
        ValueError: it is of another shape, or a row has zeros between ones.
    """
    if mask.shape != embedded.shape[:2]:
        raise ValueError(f"attention_mask must be {list(embedded.shape[:2])}, got shape {list(mask.shape)}")
    seen = mask != 0
    if bool(seen.all()):
        return None
    left = seen.int().argmax(1)
    text_first = rotate(seen, left)
    if bool((text_first[:, 1:] & ~text_first[:, :-1]).any()):
        raise ValueError("attention_mask must have its zeros at the rows' beginnings or ends, got some between ones")
    return left


def rotate(x: Tensor, by: Tensor, axis: int = 1) -> Tensor:
    """x [B, ..], each row rotated along an axis: element by[n] of row n comes first."""
    index = (torch.arange(x.size(axis), device=x.device) + by.unsqueeze(1)) % x.size(axis)
    return x.take_along_dim(index.view(-1, *[1] * (axis - 1), x.size(axis), *[1] * (x.dim() - axis - 1)), axis)


@dataclass
class TransfoXLModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLModel`.

    Attributes:
        last_hidden_state: [B, L, d_model].
        mems: a tensor [M, B, d_model] a layer, for the segment that follows; None with a cache or
            padding.
        cache: the cache that was given, with this segment in it; `past_key_values`, too.
        hidden_states: [B, L, d_model], what each layer got, then what the last made.
        attentions: [B, H, L, M + L] a layer.
    """

    last_hidden_state: Tensor | None = None
    mems: list[Tensor] | None = None
    cache: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> TransfoXLCache | None:
        return self.cache

    def rotated(self, by: Tensor) -> "TransfoXLModelOutput":
        """With positions rotated as by `rotate`; for an output without memory and cache."""
        assert self.last_hidden_state is not None
        length = self.last_hidden_state.size(1)
        hidden = self.hidden_states and tuple(rotate(x, by) for x in self.hidden_states)
        keys = [(x[..., :-length], rotate(x[..., -length:], by, 3)) for x in self.attentions or ()]
        attentions = tuple(rotate(torch.cat(x, 3), by, 2) for x in keys) or None
        return TransfoXLModelOutput(rotate(self.last_hidden_state, by), None, None, hidden, attentions)


@dataclass
class TransfoXLLMHeadModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLLMHeadModel`; the rest as in `TransfoXLModelOutput`.

    Attributes:
        loss: mean of the losses of labels that are not -100.
        losses: [B, L - 1], 0 where the label is -100; in order of the positions (the old class gave
            them in order of the bins).
        logits: log-probabilities [B, L, vocab_size]; None with labels. `prediction_scores`, too,
            the old class's name.
    """

    loss: Tensor | None = None
    losses: Tensor | None = None
    logits: Tensor | None = None
    mems: list[Tensor] | None = None
    cache: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> TransfoXLCache | None:
        return self.cache

    @property
    def prediction_scores(self) -> Tensor | None:
        return self.logits

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("logits" if key == "prediction_scores" else key)
