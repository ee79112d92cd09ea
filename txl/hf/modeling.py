"""TransfoXL for transformers, on our kernels: the model without a softmax, the language model, what
they return, and the cache of `generate()`."""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from txl.hf.configuration import TransfoXLConfig
from txl.hf.weights import TransfoXLPreTrainedModel
from txl.model.adaptive import AdaptiveSoftmax
from txl.model.transformer import HiddenMemory, States, Trunk
from txl_kernels import KeyValueCache, RelAttention

NAMES = ("cache", "past_key_values")  # of generate()'s cache: since transformers 5.24, and before


@functools.cache
def name_in_generation() -> str:
    """Where the `generate()` of this transformers keeps what a step leaves for the next one.

    Raises:
        RuntimeError: under a name of which this module knows nothing.
    """
    taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    for name in NAMES:
        if name in taken:
            return name
    raise RuntimeError(
        f"generate() of transformers {transformers.__version__} names its cache neither {' nor '.join(NAMES)}, so that "
        "txl.hf cannot follow it: use transformers 5.24.0"
    )


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """Of two arguments that mean the same."""
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values, which is its older name")
    return past_key_values if cache is None else cache


class TransfoXLCache:
    """The last mem_len keys and values of each layer, preallocated: time and memory a token do not
    grow with the text.

    Passed as `cache`, or by its older name `past_key_values`; `generate()` makes its own.

    Attributes:
        layers: a cache a layer.
        max_segment: most tokens of one call; more are read in several.
    """

    # What generate() asks of a cache.
    is_compileable = False
    is_croppable = False

    def __init__(self, trunk: Trunk, batch: int, max_segment: int = 128) -> None:
        """At the start of a text: no memory, or zeros of mem_len (`config.initial_memory`)."""
        self.max_segment, self._seen = max_segment, 0
        self.layers: list[KeyValueCache] = []
        with torch.no_grad():
            for block in trunk.layers:
                assert isinstance(block.attention, RelAttention)
                self.layers.append(block.attention.new_cache(batch, trunk.config.mem_len, max_segment))
            trunk.begin(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer whether its attention is linear."""
        return [False] * len(self)

    def saw(self, count: int) -> None:
        """Counts tokens read."""
        self._seen += count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, those that were dropped included."""
        return self._seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts rows into the order of the beams."""
        for cache in self.layers:
            cache.reorder(beam_idx.long())


@dataclass
class TransfoXLModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLModel`.

    Attributes:
        last_hidden_state: [B, L, d_model].
        mems: a tensor [M, B, d_model] a layer, for the segment that follows; None with a cache.
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


@dataclass
class TransfoXLLMHeadModelOutput(ModelOutput):  # type: ignore[misc]
    """Output of `TransfoXLLMHeadModel`; the rest as in `TransfoXLModelOutput`.

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
    cache: TransfoXLCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> TransfoXLCache | None:
        return self.cache

    @property
    def logits(self) -> Tensor | None:
        return self.prediction_scores


class TransfoXLModel(TransfoXLPreTrainedModel):
    """Embeddings and layers with memory (Dai et al. 2019); no softmax."""

    def __init__(self, config: TransfoXLConfig) -> None:
        """Raises TxlError: the configuration is of no such model."""
        super().__init__(config)
        self.trunk = Trunk(config.model_config())
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether backward computes the layers anew."""
        return any(block.recompute for block in self.trunk.layers) if hasattr(self, "trunk") else False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        for block in self.trunk.layers:
            block.recompute = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.embedding

    def new_cache(self, batch: int, max_segment: int = 128) -> TransfoXLCache:
        """For `cache`, at the start of a text."""
        return TransfoXLCache(self.trunk, batch, max_segment)

    def forward(
        self,
        input_ids: Tensor | None = None,
        mems: list[Tensor] | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: TransfoXLCache | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        cache: TransfoXLCache | None = None,
    ) -> Any:
        """A segment after its memory.

        Args:
            input_ids: [B, L]; or inputs_embeds [B, L, d_model], scaled embeddings.
            mems: of the call for the segment before, [M, B, d_model] a layer; None at the start of
                a text.
            attention_mask: [B, L]: ones, or zeros at a row's end, which nothing before them reads;
                no mems come out then. Other padding is refused.
            use_cache: False for no mems; a cache comes out if one went in.
            cache: keys and values in place of mems, evaluation only; from `new_cache`. Its older
                name, past_key_values, means the same.

        Returns:
            `TransfoXLModelOutput`, or a tuple of what there is.

        Raises:
            ValueError, RuntimeError: an argument, by name.
        """
        if self.config.mem_len != self.trunk.config.mem_len:
            raise ValueError(
                f"config.mem_len was changed to {self.config.mem_len}: call reset_memory_length({self.config.mem_len})"
            )
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        embedded = self._embed(input_ids, inputs_embeds)
        padded = attention_mask is not None and _is_padded(attention_mask, embedded)
        cache = one_cache(cache, past_key_values)
        if cache is not None:
            if not isinstance(cache, TransfoXLCache):
                raise TypeError(f"cache must be a TransfoXLCache, got {type(cache).__name__}")
            if padded:
                raise ValueError("attention_mask must be of ones with cache: read texts of one length")
            if mems is not None or attentions or hidden:
                raise ValueError("cache goes with neither mems, output_attentions nor output_hidden_states")
            output = TransfoXLModelOutput(self._read_cached(embedded, cache), None, cache)
        else:
            output = self._read(embedded, mems, attentions, hidden, keep=use_cache is not False and not padded)
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return output if dictionary else output.to_tuple()

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
        self, embedded: Tensor, mems: list[Tensor] | None, attentions: bool, hidden: bool, keep: bool
    ) -> TransfoXLModelOutput:
        memory = None if mems is None else tuple(x.transpose(0, 1) for x in mems)
        states = self.trunk.read_embedded(embedded, memory)
        kept = None if states.memory is None or not keep else [x.transpose(0, 1) for x in states.memory]
        return TransfoXLModelOutput(
            states.hidden,
            kept,
            None,
            (*states.inputs, states.hidden) if hidden else None,
            self._attentions(states, memory) if attentions else None,
        )

    def _attentions(self, states: States, memory: HiddenMemory | None) -> tuple[Tensor, ...]:
        """Computed anew: the kernels keep none."""
        if memory is None:
            memory = self.trunk.initial_memory(states.hidden.size(0))
        found = []
        for i, (block, x) in enumerate(zip(self.trunk.layers, states.inputs, strict=True)):
            past = None if memory is None else block.attention_input(memory[i])
            assert isinstance(block.attention, RelAttention)
            found.append(block.attention.weights(block.attention_input(x), past))
        return tuple(found)

    def _read_cached(self, embedded: Tensor, cache: TransfoXLCache) -> Tensor:
        if self.training:
            raise RuntimeError("cache is for evaluation: call model.eval()")
        parts = embedded.split(cache.max_segment, 1)
        read = [self.trunk.read_cached(part, cache.layers) for part in parts]
        cache.saw(embedded.size(1))
        return read[0] if len(read) == 1 else torch.cat(read, 1)


def _is_padded(mask: Tensor, embedded: Tensor) -> bool:
    """Whether rows end with padding; raises ValueError for padding elsewhere."""
    if mask.shape != embedded.shape[:2]:
        raise ValueError(f"attention_mask must be {list(embedded.shape[:2])}, got shape {list(mask.shape)}")
    seen = mask != 0
    if bool(seen.all()):
        return False
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise ValueError("attention_mask must have its zeros at the rows' ends: padding before a text is not supported")
    return True


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
        cache: TransfoXLCache | None = None,
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
            None,
            attention_mask,
            output_attentions,
            output_hidden_states,
            True,
            use_cache,
            one_cache(cache, past_key_values),
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
            loss, losses, scores, read.mems, read.cache, read.hidden_states, read.attentions
        )
        dictionary = self.config.return_dict if return_dict is None else return_dict
        return output if dictionary else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: TransfoXLCache | list[Tensor] | None = None,
        cache: TransfoXLCache | list[Tensor] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that the cache has not seen; a cache at the start, unless the text follows
        `mems`, or what only goes with those is wanted."""
        name_in_generation()
        if input_ids.size(1) == 0:
            raise ValueError("input_ids must hold a token at least, to generate from")
        past = one_cache(cache, past_key_values)
        if past is not None and not isinstance(past, (TransfoXLCache, list)):
            raise TypeError(f"cache must be a TransfoXLCache, got {type(past).__name__}")
        cached, mems = kwargs.get("use_cache") is not False, kwargs.get("mems")
        shown = {name: kwargs.get(name) for name in ("output_attentions", "output_hidden_states")}
        cache = past if isinstance(past, TransfoXLCache) else None
        if cached and mems is None and past is None and not self.training and not any(shown.values()):
            cache = self.transformer.new_cache(input_ids.size(0))
        elif cached and isinstance(past, list):  # the mems of the last step
            mems, input_ids = past, input_ids[:, -1:]
        mask = kwargs.get("attention_mask")
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
            "mems": mems,
            "attention_mask": mask,
            "use_cache": cached,
            **shown,
            "logits_to_keep": kwargs.get("logits_to_keep") or 1,
        }

    def _update_model_kwargs_for_generation(
        self, outputs: TransfoXLLMHeadModelOutput, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Where beams are put into order: the cache, or else the mems of this step."""
        updated: dict[str, Any] = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        for name in NAMES:
            updated.pop(name, None)
        left = outputs.mems if outputs.cache is None else outputs.cache
        return updated if left is None else updated | {name_in_generation(): left}

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
