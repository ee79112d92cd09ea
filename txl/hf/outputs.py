"""Outputs of the models."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from txl.hf.cache import TransfoXLCache


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
