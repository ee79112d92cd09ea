"""A text classifier: a linear layer on the hidden state of each row's last token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from txl.hf.configuration import TransfoXLConfig
from txl.hf.modeling import TransfoXLModel
from txl.hf.weights import TransfoXLPreTrainedModel


@dataclass
class TransfoXLSequenceClassifierOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLForSequenceClassification`; the rest as in `TransfoXLModelOutput`.

    Attributes:
        loss: loss of the labels, chosen by `config.problem_type` as elsewhere in transformers.
        logits: scores [B, config.num_labels].
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    mems: list[Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class TransfoXLForSequenceClassification(TransfoXLPreTrainedModel):
    """TransfoXL with a head that scores config.num_labels classes for each row."""

    accepts_loss_kwargs = False

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raise TxlError if the configuration is not one of a model that `txl` supports."""
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: Sequence[Tensor | None] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Score the classes of each row; other arguments as in `TransfoXLModel.forward`.

        Args:
            labels: int64 [B], or of the form that config.problem_type requires.
            attention_mask: [B, L], used to find each row's last token; if it is None, tokens other
                than config.pad_token_id count as text.

        Raises:
            ValueError: an argument is invalid (the message names it), or there are several rows and
                neither attention_mask nor pad_token_id.
        """
        mask, pad = attention_mask, self.config.pad_token_id
        if mask is None and pad is not None and input_ids is not None:
            mask = (input_ids != pad).long()
        read = self.transformer(
            input_ids, mems, inputs_embeds, None, mask, output_attentions, output_hidden_states, True
        )
        hidden: Tensor = read.last_hidden_state
        batch, length = hidden.shape[:2]
        if mask is None and batch > 1 and pad is None:
            raise ValueError("attention_mask must be given for several rows, or config.pad_token_id set")
        last = -1 if mask is None else ((mask != 0) * torch.arange(length, device=mask.device)).argmax(1)
        logits = self.score(hidden[torch.arange(batch, device=hidden.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=None, labels=labels, pooled_logits=logits, config=self.config)
        output = TransfoXLSequenceClassifierOutput(loss, logits, read.mems, read.hidden_states, read.attentions)
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return output if dictionary else output.to_tuple()
