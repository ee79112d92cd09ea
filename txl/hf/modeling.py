"""TransfoXL for transformers, on the kernels of txl_kernels: the base model, the language model and
the classifier."""

import functools
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from txl.hf.configuration import TransfoXLConfig
from txl.hf.outputs import TransfoXLCache, TransfoXLLMHeadModelOutput, TransfoXLModelOutput, one_cache
from txl.hf.weights import TransfoXLPreTrainedModel
from txl.model.adaptive import IGNORED, AdaptiveSoftmax
from txl.model.transformer import HiddenMemory, States, Trunk
from txl_kernels import RelAttention

NAMES = ("cache", "past_key_values")  # argument name of generate()'s cache: since transformers 5.24, and before


@functools.cache
def name_in_generation() -> str:
    """Return the argument name by which `generate()` of the installed transformers passes a step's
    cache to the next step.

    Raises:
        RuntimeError: the name is not in `NAMES`.
    """
    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for name in NAMES:
        if name in taken:
            return name
    raise RuntimeError(
        f"generate() of transformers {transformers.__version__} names its cache neither {' nor '.join(NAMES)}, so that "
        "txl.hf cannot follow it: use transformers 5.24.0"
    )


class TransfoXLModel(TransfoXLPreTrainedModel):
    """The base model (Dai et al. 2019): embeddings and layers with memory, without a softmax."""

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raise TxlError if the configuration is not one of a model that `txl` supports."""
        super().__init__(config)
        self.trunk = Trunk(config.model_config())
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether backward recomputes the layers."""
        return any(block.recompute for block in self.trunk.layers) if hasattr(self, "trunk") else False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        for block in self.trunk.layers:
            block.recompute = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.embedding

    def new_cache(self, batch: int, max_segment: int | None = None) -> TransfoXLCache:
        """Make a value for the argument `cache`, at the start of a text; max_segment: as in
        `TransfoXLCache`."""
        return TransfoXLCache(self.trunk, batch, max_segment)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: TransfoXLCache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        cache: TransfoXLCache | None = None,
    ) -> Any:
        """Compute the hidden states of a segment, given its memory.

        Args:
            input_ids: [B, L]; alternatively inputs_embeds: [B, L, d_model], scaled embeddings.
            mems: the mems returned for the previous segment, [M, B, d_model] for each layer; None
                at the start of a text.
            attention_mask: [B, L], ones, with zeros for padding at the ends of rows; with a cache,
                at the beginnings of rows where the text starts. A padded row gives the same result
                as without padding, and no mems are returned.
            use_cache: False to return no mems; a cache that is given is returned in any case.
            cache: a cache from `new_cache` used instead of mems, for evaluation only.
                past_key_values is its older name.

        Returns:
            `TransfoXLModelOutput`, or a tuple of its fields that are not None if return_dict is
            False.

        Raises:
            ValueError, RuntimeError: an argument is invalid; the message names it.
        """
        if self.config.mem_len != self.trunk.config.mem_len:
            raise ValueError(
                f"config.mem_len was changed to {self.config.mem_len}: call reset_memory_length({self.config.mem_len})"
            )
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        embedded = self._embed(input_ids, inputs_embeds)
        memory, (batch, d_model) = None, embedded.shape[::2]
        if mems is not None:
            shapes = {tuple(x.shape) if isinstance(x, Tensor) else () for x in mems}
            if len(mems) != self.config.n_layer or len(shapes) != 1 or shapes.pop()[1:] != (batch, d_model):
                raise ValueError(
                    f"mems must be None or {self.config.n_layer} tensors [M, B, d_model] = [M, {batch}, {d_model}]"
                )
            memory = tuple(x.transpose(0, 1) for x in mems)
        cache = one_cache(cache, past_key_values)
        padding = None if attention_mask is None else _padding(attention_mask, batch, embedded.size(1), cache is None)
        if cache is not None:
            if not isinstance(cache, TransfoXLCache):
                raise TypeError(f"cache must be a TransfoXLCache, got {type(cache).__name__}")
            if memory is not None or attentions or hidden:
                raise ValueError("cache goes with neither mems, output_attentions nor output_hidden_states")
            with cache.unchanged_on_error():
                return TransfoXLModelOutput(self._read_cached(embedded, cache, padding), None, cache)
        return self._read(embedded, memory, attentions, hidden, keep=padding is None and use_cache is not False)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is not None and inputs_embeds is None:
            if input_ids.dim() != 2 or input_ids.size(1) == 0:
                raise ValueError(f"input_ids must be [B, L] with L >= 1, got shape {list(input_ids.shape)}")
            return self.trunk.embed(input_ids)
        if inputs_embeds is None or input_ids is not None:
            raise ValueError("pass either input_ids or inputs_embeds")
        d_model = self.config.d_model
        if inputs_embeds.dim() != 3 or inputs_embeds.size(1) == 0 or inputs_embeds.size(2) != d_model:
            raise ValueError(f"inputs_embeds must be [B, L, {d_model}], got shape {list(inputs_embeds.shape)}")
        return inputs_embeds

    def _read(
        self, embedded: Tensor, memory: HiddenMemory | None, attentions: bool, hidden: bool, keep: bool
    ) -> TransfoXLModelOutput:
        states = self.trunk.read(embedded, memory)
        kept = None if states.memory is None or not keep else [x.transpose(0, 1) for x in states.memory]
        return TransfoXLModelOutput(
            states.hidden,
            kept,
            None,
            (*states.inputs, states.hidden) if hidden else None,
            self._attentions(states, memory) if attentions else None,
        )

    def _attentions(self, states: States, memory: HiddenMemory | None) -> tuple[Tensor, ...]:
        """Recompute the attention weights of all layers, which the kernels do not store."""
        if memory is None:
            memory = self.trunk.initial_memory(states.hidden.size(0))
        found = []
        for i, (block, x) in enumerate(zip(self.trunk.layers, states.inputs, strict=True)):
            past = None if memory is None else block.attention_input(memory[i])
            assert isinstance(block.attention, RelAttention)
            found.append(block.attention.weights(block.attention_input(x), past))
        return tuple(found)

    def _read_cached(self, embedded: Tensor, cache: TransfoXLCache, left: Tensor | None) -> Tensor:
        """Read embeddings with a cache, in segments; left: [B], padding before each row's text, all
        of it in the first segment, or None for no padding."""
        if self.training:
            raise RuntimeError("cache is for evaluation: call model.eval()")
        first, *others = embedded.split(cache.max_segment, 1)
        if left is None:
            read = [self.trunk.read_cached(first, cache.layers)]
        else:
            cache.pad(left)
            read = [self._read_padded(first, cache, left)]
        read += [self.trunk.read_cached(part, cache.layers) for part in others]
        cache.saw(embedded.size(1))
        return read[0] if len(read) == 1 else torch.cat(read, 1)

    def _read_padded(self, hidden: Tensor, cache: TransfoXLCache, left: Tensor) -> Tensor:
        """Read a segment as `Trunk.read_cached` does, with padded positions set to zero states."""
        padding = (torch.arange(hidden.size(1), device=left.device) < left.unsqueeze(1)).unsqueeze(2)
        for block, layer in zip(self.trunk.layers, cache.layers, strict=True):
            hidden = hidden.masked_fill(padding, 0)
            hidden = block.after_attention(hidden, block.attention(block.attention_input(hidden), cache=layer))
        return self.trunk.finish(hidden)


def _padding(mask: Tensor, batch: int, length: int, at_end: bool) -> Tensor | None:
    """Return the number of zeros in each row of an attention mask [B, L], int64 [B]; None if there
    are none.

    Raises:
        ValueError: the mask has another shape, or a zero that is not at the rows' ends, or with
            at_end False not at their beginnings.
    """
    if mask.shape != (batch, length):
        raise ValueError(f"attention_mask must be {[batch, length]}, got shape {list(mask.shape)}")
    padding = mask == 0
    if not bool(padding.any()):
        return None
    wrong = padding[:, :-1] & ~padding[:, 1:] if at_end else padding[:, 1:] & ~padding[:, :-1]
    if bool(wrong.any()) or not (at_end or bool(mask[:, -1].all())):
        place = (
            "only at the rows' ends, unless there is a cache" if at_end else "only at the rows' beginnings with a cache"
        )
        raise ValueError(f"attention_mask must have zeros {place}")
    return padding.sum(1)


class TransfoXLLMHeadModel(TransfoXLPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model: scores (log-probabilities) of the next token, or losses."""

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raise TxlError if the configuration is not one of a model that `txl` supports."""
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # makes Trainer count the scored labels: all but the first of a row
        self.transformer = TransfoXLModel(config)
        self.crit = AdaptiveSoftmax(config.model_config(), self.transformer.trunk.embedding)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: Sequence[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: TransfoXLCache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: TransfoXLCache | None = None,
    ) -> Any:
        """Compute scores of the next tokens, or with labels their losses; other arguments as in
        `TransfoXLModel.forward`.

        Args:
            labels: [B, L], shifted in this method: position n - 1 predicts the label of position n.
                Labels of -100 and a row's first token after padding are not scored. With labels,
                the output has losses instead of scores.
            logits_to_keep: number of final positions to return scores for; 0 for all.
            num_items_in_batch: divisor of the sum of the losses; None for the number of scored
                labels.

        Returns:
            `TransfoXLLMHeadModelOutput`, or a tuple of its fields that are not None if return_dict
            is False.
        """
        cache = one_cache(cache, past_key_values)
        with cache.unchanged_on_error() if isinstance(cache, TransfoXLCache) else nullcontext():
            read = self.transformer(
                input_ids,
                mems,
                inputs_embeds,
                None,
                attention_mask,
                output_attentions,
                output_hidden_states,
                use_cache,
                cache,
                return_dict=True,
            )
            hidden = read.last_hidden_state
            loss = losses = scores = None
            if labels is None:
                scores = self.crit.log_probs(hidden[:, -logits_to_keep:])
            else:
                if labels.shape != hidden.shape[:2]:
                    raise ValueError(f"labels must be {list(hidden.shape[:2])}, got shape {list(labels.shape)}")
                goals = labels[:, 1:].long()
                if attention_mask is not None:
                    first = (attention_mask[:, :-1] == 0) & (attention_mask[:, 1:] != 0)
                    goals = goals.masked_fill(first, IGNORED)
                losses = self.crit.nll(hidden[:, :-1], goals)
                if isinstance(num_items_in_batch, Tensor):
                    num_items_in_batch = num_items_in_batch.to(losses.device)
                scored = (goals != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
                loss = losses.sum() / scored
            return TransfoXLLMHeadModelOutput(
                loss, losses, scores, read.mems, read.cache, read.hidden_states, read.attentions
            )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: TransfoXLCache | None = None,
        cache: TransfoXLCache | None = None,
        mems: None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Select the tokens that the cache has not read, and make a cache at the start of the text
        unless `use_cache` is False, the model is in training mode, or outputs are asked for that a
        cache does not give."""
        name_in_generation()
        if input_ids.size(1) == 0:
            raise ValueError("input_ids must hold a token at least, to generate from")
        if mems is not None:
            raise ValueError("mems must be None in generate(): a text is continued by the cache that read it")
        cache, cached = one_cache(cache, past_key_values), kwargs.get("use_cache") is not False
        if cache is not None and not isinstance(cache, TransfoXLCache):
            raise TypeError(f"cache must be a TransfoXLCache, got {type(cache).__name__}")
        shown = {name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")}
        mask = kwargs.get("attention_mask")
        if cache is None and cached and not self.training and not any(shown.values()):
            padded = mask is not None and not bool(mask.all())  # all padding must be in the first segment
            cache = self.transformer.new_cache(input_ids.size(0), input_ids.size(1) if padded else None)
        if cache is not None:
            seen = cache.get_seq_length()
            if seen >= input_ids.size(1):
                raise ValueError(
                    f"input_ids must begin with the {seen} tokens that the cache has seen and go on, got "
                    f"{input_ids.size(1)}"
                )
            input_ids, mask = input_ids[:, seen:], mask if seen == 0 else None
        return {
            "input_ids": input_ids,
            "cache": cache,
            "attention_mask": mask,
            "use_cache": False,
            **shown,
            "logits_to_keep": kwargs.get("logits_to_keep") or 1,
        }

    def _update_model_kwargs_for_generation(
        self, outputs: TransfoXLLMHeadModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Pass the cache to the next step, where beam search reorders it."""
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        for name in NAMES:
            updated.pop(name, None)
        return updated if outputs.cache is None else updated | {name_in_generation(): outputs.cache}


class TransfoXLForSequenceClassification(TransfoXLPreTrainedModel):
    """TransfoXL with a linear layer that scores config.num_labels classes for each row."""

    accepts_loss_kwargs = False

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raise TxlError if the configuration is not one of a model that `txl` supports."""
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Score the classes of each row by the hidden state of its last token.

        Args:
            attention_mask: [B, L]; if it is None, tokens other than config.pad_token_id count as
                text.
            labels: int64 [B], or of the form that config.problem_type requires.
            options: as in `TransfoXLModel.forward`.

        Returns:
            transformers' `SequenceClassifierOutput`, with logits [B, config.num_labels].

        Raises:
            ValueError: an argument is invalid (the message names it), or there are several rows and
                neither attention_mask nor pad_token_id.
        """
        mask, pad = attention_mask, self.config.pad_token_id
        if mask is None and pad is not None and input_ids is not None:
            mask = (input_ids != pad).long()
        read = self.transformer(input_ids, attention_mask=mask, **options, return_dict=True)
        batch, length = read.last_hidden_state.shape[:2]
        if mask is None and batch > 1 and pad is None:
            raise ValueError("attention_mask must be given for several rows, or config.pad_token_id set")
        last = -1 if mask is None else ((mask != 0) * torch.arange(length, device=mask.device)).argmax(1)
        logits = self.score(read.last_hidden_state[torch.arange(batch, device=self.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=None, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss, logits, read.hidden_states, read.attentions)
