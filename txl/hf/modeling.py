"""TransfoXL without a softmax, for transformers, on our kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from txl.hf.cache import TransfoXLCache
from txl.hf.configuration import TransfoXLConfig
from txl.hf.output import TransfoXLModelOutput
from txl.hf.pretrained import TransfoXLPreTrainedModel
from txl.model.transformer import HiddenMemory, States, Trunk
from txl_kernels import RelAttention


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
        """For `past_key_values`, at the start of a text."""
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
    ) -> Any:
        """A segment after its memory.

        Args:
            input_ids: [B, L]; or inputs_embeds [B, L, d_model], scaled embeddings.
            mems: of the call for the segment before, [M, B, d_model] a layer; None at the start of
                a text.
            past_key_values: keys and values in place of mems, evaluation only; from `new_cache`.
            attention_mask: [B, L]: ones, or zeros at a row's end, which nothing before them reads;
                no mems come out then. Other padding is refused.
            use_cache: False for no mems; a cache comes out if one went in.

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
        if past_key_values is not None:
            if not isinstance(past_key_values, TransfoXLCache):
                raise TypeError(f"past_key_values must be a TransfoXLCache, got {type(past_key_values).__name__}")
            if padded:
                raise ValueError("attention_mask must be of ones with past_key_values: read texts of one length")
            if mems is not None or attentions or hidden:
                raise ValueError("past_key_values goes with neither mems, output_attentions nor output_hidden_states")
            output = TransfoXLModelOutput(self._read_cached(embedded, past_key_values), None, past_key_values)
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
            raise RuntimeError("past_key_values is for evaluation: call model.eval()")
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
