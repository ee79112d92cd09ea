"""Outputs of the models, and left padding, which is rotated to the end of the rows before they are
read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from txl.hf.cache import TransfoXLCache


def left_padding(mask: Tensor, embedded: Tensor) -> Tensor | None:
    """Return the number of zeros before each row's ones, int64 [B]; None if the mask is all ones.

    Raises:
        ValueError: the mask has another shape than [B, L], or a row has zeros between ones.
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
    """Rotate each row of x [B, ..] along an axis, so that element by[n] of row n comes first."""
    index = (torch.arange(x.size(axis), device=x.device) + by.unsqueeze(1)) % x.size(axis)
    return x.take_along_dim(index.view(-1, *[1] * (axis - 1), x.size(axis), *[1] * (x.dim() - axis - 1)), axis)


@dataclass
class TransfoXLModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLModel`.

    Attributes:
        last_hidden_state: [B, L, d_model].
        mems: the memory for the next segment, [M, B, d_model] for each layer; None with a cache or
            padding.
        cache: the cache that was given, with this segment added; also available as
            `past_key_values`.
        hidden_states: [B, L, d_model], the input of each layer, then the output of the last.
        attentions: [B, H, L, M + L] for each layer.
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
        """Return the output with its positions rotated by `rotate`; it must have no mems and no
        cache."""
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
        loss: mean loss of the labels other than -100.
        losses: [B, L - 1], in order of positions (transformers' own class ordered them by bin); 0
            where the label is -100.
        logits: log-probabilities [B, L, vocab_size]; None with labels. Also available as
            `prediction_scores`, the old name.
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
