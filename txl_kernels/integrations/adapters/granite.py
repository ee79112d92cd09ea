"""Granite Speech in transformers: Shaw's relative attention with one table for all heads, in blocks
that see only themselves. In release 5 frames may be padding, too."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.adapters.transformers import peer, why_not_interface
from txl_kernels.integrations.attention import (
    ALL,
    Bounds,
    attend,
    bounds_or_reason,
    condition_met,
    memoized,
    merge_heads,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, RandomInputs, Sample, width_of


class Granite(Accelerated):
    needs = ("pre_norm", "to_q", "to_kv", "rel_pos_emb", "context_size", "max_pos_emb")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        distances = _distances(module.context_size, module.max_pos_emb, torch.device("cpu"))
        return inputs.normal(
            inputs.B, max(2 * module.context_size + 3, inputs.T), width_of(module.to_q)
        ), lambda m, x: m(x, distances)

    def forward(self: Any, hidden_states: Tensor, attention_dists: Tensor) -> Tensor | str:
        why = self.why_not_kernel(hidden_states) or _why_not_distances(self, attention_dists, self.max_pos_emb)
        if why is not None:
            return why
        x = self.pre_norm(hidden_states)
        keys, values = self.to_kv(x).chunk(2, -1)
        q, k, v = (split_heads(y, self.num_heads) for y in (self.to_q(x), keys, values))
        out = _in_blocks(self, q, k, v, ALL, self.max_pos_emb, scale=self.scale)
        return self.dropout(self.to_out(out))  # type: ignore[no-any-return]


class Granite5(Accelerated):
    needs = ("q_proj", "rel_pos_emb", "context_size", "head_dim", "attention_dropout", "num_key_value_groups")

    @staticmethod
    def sample_length(module: Any, least: int) -> int:
        blocks = max(3, 1 + least // int(module.context_size))
        return blocks * int(module.context_size) - 1  # no block consists of padding, and the last one is shorter

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        distances = _distances(module.context_size, module.config.max_position_embeddings, torch.device("cpu"))
        mask = ~inputs.padding(seen)  # it supports no other mask
        return inputs.frames(width_of(module.q_proj)), lambda m, x: m(x, distances, attention_mask=mask)

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        zero = self.config.max_position_embeddings
        dropout_p = float(self.attention_dropout) if self.training else 0.0
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        why = why or _why_not_distances(self, position_embeddings, zero)
        bounds = bounds_or_reason(why, attention_mask, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        width = self.head_dim
        q, k, v = (split_heads(f(hidden_states), width=width) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(_in_blocks(self, q, k, v, bounds, zero, scale=self.scaling, dropout_p=dropout_p)), None


def _in_blocks(self: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, zero: int, **settings: Any) -> Tensor:
    """Return the attention [B, L, H * D] in blocks, each of which sees only itself.

    zero: the row of the table that holds distance 0.
    """
    size = self.context_size
    rows = torch.arange(zero - size + 1, zero + size, device=q.device)  # distances 1 - size .. size - 1
    r = self.rel_pos_emb(rows).to(q.dtype).unsqueeze(0)
    window = self.setting("window")
    out = attend(q, k, v, r, None, None, bounds, zero_row=size - 1, chunk=(size, 0), window=window, **settings)
    return merge_heads(out)


def _distances(size: int, zero: int, device: torch.device) -> Tensor:
    """Return the row of the table for each pair (i, j) of a block, as the encoder makes it."""
    at = torch.arange(size, device=device)
    return at.unsqueeze(1) - at + zero


def _why_not_distances(self: Any, distances: Tensor, zero: int) -> str | None:
    """Return the reason why distances are not those that the encoder makes, or None."""
    size = self.context_size

    def usual() -> bool:
        if distances.shape != (size, size):
            return False
        message = "attention_dists are of another order than those this compiled call was traced with"
        return condition_met((distances == _distances(size, zero, distances.device)).all(), message)

    return None if memoized("distances", distances, (size, zero), usual) else "distances of another order"


PEERS = (
    peer("GraniteSpeech", "granite_speech.GraniteSpeechConformerAttention", Granite,
         {"4.53.3": "fc37c809128339b7", "4.55.4": "5507f9686208c07c", "5.13.1": "4d8e826731537b94"}),
    peer("GraniteSpeechPlus", "granite_speech_plus.GraniteSpeechPlusConformerAttention", Granite,
         {"5.9.0": "5507f9686208c07c", "5.13.1": "4d8e826731537b94"}),
    peer("GraniteSpeech5", "granite_speech5.GraniteSpeech5EncoderAttention", Granite5, {"5.17.0": "166b72684ddd4bda"}),
)  # fmt: skip
