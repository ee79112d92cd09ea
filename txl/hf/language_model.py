"""TransfoXL as a language model: scores, losses, `generate()`."""

from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from txl.hf.cache import TransfoXLCache
from txl.hf.configuration import TransfoXLConfig
from txl.hf.modeling import TransfoXLModel
from txl.hf.output import TransfoXLLMHeadModelOutput
from txl.hf.pretrained import TransfoXLPreTrainedModel
from txl.model.adaptive import AdaptiveSoftmax


class TransfoXLLMHeadModel(TransfoXLPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model: log-probabilities of the next token, or losses."""

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raises TxlError: the configuration is of no such model."""
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.crit = AdaptiveSoftmax(config.model_config(), self.transformer.trunk.embedding)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: list[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: TransfoXLCache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As `TransfoXLModel.forward`.

        Args:
            labels: [B, L], shifted here: the label of position n is scored by position n - 1; -100
                is not scored. With them there are losses and no scores.
            logits_to_keep: positions at the end whose scores are wanted; 0 for all.
            num_items_in_batch: what the sum of the losses is divided by; None for those scored.

        Returns:
            `TransfoXLLMHeadModelOutput`, or a tuple of what there is.
        """
        read = self.transformer(
            input_ids,
            mems,
            inputs_embeds,
            past_key_values,
            attention_mask,
            output_attentions,
            output_hidden_states,
            True,
            use_cache,
        )
        hidden = read.last_hidden_state
        loss = losses = scores = None
        if labels is None:
            scores = self.crit.log_probs(hidden[:, -logits_to_keep:])
        else:
            if labels.shape != hidden.shape[:2]:
                raise ValueError(f"labels must be {list(hidden.shape[:2])}, got shape {list(labels.shape)}")
            losses = self.crit.nll(hidden[:, :-1], labels[:, 1:].long())
            scored = (labels[:, 1:] != -100).sum().clamp(min=1)
            loss = losses.sum() / (scored if num_items_in_batch is None else num_items_in_batch)
        output = TransfoXLLMHeadModelOutput(
            loss, losses, scores, read.mems, read.past_key_values, read.hidden_states, read.attentions
        )
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return output if dictionary else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: TransfoXLCache | list[Tensor] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens that the cache has not seen; a cache at the start, unless the text follows
        `mems`, or what only goes with those is wanted."""
        if input_ids.size(1) == 0:
            raise ValueError("input_ids must hold a token at least, to generate from")
        cached, mems = kwargs.get("use_cache") is not False, kwargs.get("mems")
        shown = {name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")}
        cache = past_key_values if isinstance(past_key_values, TransfoXLCache) else None
        if cached and mems is None and past_key_values is None and not self.training and not any(shown.values()):
            cache = self.transformer.new_cache(input_ids.size(0))
        elif cached and isinstance(past_key_values, list):  # the mems of the last step
            mems, input_ids = past_key_values, input_ids[:, -1:]
        mask = kwargs.get("attention_mask")
        if cache is not None:
            seen = cache.get_seq_length()
            if seen >= input_ids.size(1):
                raise ValueError(
                    f"input_ids must begin with the {seen} tokens that past_key_values has seen and go on, got "
                    f"{input_ids.size(1)}"
                )
            input_ids, mask = input_ids[:, seen:], mask if seen == 0 else None
        return {
            "input_ids": input_ids,
            "past_key_values": cache,
            "mems": mems,
            "attention_mask": mask,
            "use_cache": cached,
            **shown,
            "logits_to_keep": kwargs.get("logits_to_keep") or 1,
        }

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """For each of the beams; mems too, whose rows are their second axis."""
        mems, times = kwargs.get("mems"), kwargs.get("expand_size", 1)
        if mems is not None and times > 1:
            kwargs["mems"] = [x.repeat_interleave(times, 1) for x in mems]
        return super()._expand_inputs_for_generation(*args, **kwargs)

    @staticmethod
    def _reorder_cache(past: TransfoXLCache | list[Tensor] | None, beam_idx: Tensor) -> Any:
        """The rows of the beams that go on."""
        if isinstance(past, TransfoXLCache):
            past.reorder_cache(beam_idx)
            return past
        return past and [x.index_select(1, beam_idx) for x in past]
