"""What the models return."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from txl.hf.cache import TransfoXLCache


@dataclass
class TransfoXLModelOutput(ModelOutput):  # type: ignore[misc]
    """Of `TransfoXLModel`.

    Attributes:
        last_hidden_state: [B, L, d_model].
        mems: a tensor [M, B, d_model] a layer, for the segment that follows; None with a cache.
        past_key_values: the cache that was given, with this segment in it.
        hidden_states: [B, L, d_model], what each layer got, then what the last made.
        attentions: [B, H, L, M + L] a layer.
    """

    last_hidden_state: Tensor | None = None
    mems: list[Tensor] | None = None
    past_key_values: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class TransfoXLLMHeadModelOutput(ModelOutput):  # type: ignore[misc]
    """Of `TransfoXLLMHeadModel`; the rest as in `TransfoXLModelOutput`.

    Attributes:
        loss: mean of the losses of labels that are not -100.
        losses: [B, L - 1], 0 where the label is -100; in order of the positions (the old class gave
            them in order of the bins).
        prediction_scores: log-probabilities [B, L, vocab_size]; None with labels.
    """

    loss: Tensor | None = None
    losses: Tensor | None = None
    prediction_scores: Tensor | None = None
    mems: list[Tensor] | None = None
    past_key_values: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def logits(self) -> Tensor | None:
        return self.prediction_scores
