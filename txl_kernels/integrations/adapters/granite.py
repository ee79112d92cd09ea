"""Granite Speech in transformers: Shaw's relative attention with one table for all heads, in blocks
that see only themselves. In release 5 frames may be padding, too."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.adapters.transformers import own_way
from txl_kernels.integrations.attention import (
    ALL,
    Bounds,
    attend,
    bounds_or_reason,
    holds,
    merge_heads,
    once,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, Draw, Peer, Sample, width_of


class Granite(Accelerated):
    needs = ("pre_norm", "to_q", "to_kv", "rel_pos_emb", "context_size", "max_pos_emb")

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample:
        size, at = module.context_size, torch.arange(module.context_size, device="cpu")
        distances = at.unsqueeze(1) - at + module.max_pos_emb
        return draw.normal(draw.B, 2 * size + 3, width_of(module.to_q)), lambda m, x: m(x, distances)

    def forward(self: Any, hidden_states: Tensor, attention_dists: Tensor) -> Tensor:
        size, zero = self.context_size, self.max_pos_emb
        why = self.why_not_kernel(hidden_states)
        usual = why is None and once(
            "distances", attention_dists, (size, zero), lambda: _usual(attention_dists, size, zero)
        )
        if not usual:
            return self.fall_back(why or "distances of another order", hidden_states, attention_dists)  # type: ignore[no-any-return]
        x = self.pre_norm(hidden_states)
        keys, values = self.to_kv(x).chunk(2, -1)
        q, k, v = (split_heads(y, self.num_heads) for y in (self.to_q(x), keys, values))
        out = _in_blocks(self, q, k, v, ALL, zero, scale=self.scale)
        return self.dropout(self.to_out(merge_heads(out)))  # type: ignore[no-any-return]


class Granite5(Accelerated):
    needs = ("q_proj", "rel_pos_emb", "context_size", "head_dim", "attention_dropout", "num_key_value_groups")

    @staticmethod
    def reach(module: Any) -> int:
        return 3 * int(module.context_size) - 1  # no block consists of padding, and the last one is shorter

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample:
        at = torch.arange(module.context_size, device="cpu")
        distances = at.unsqueeze(1) - at + module.config.max_position_embeddings
        mask = seen[:, 0] if seen is not None and seen.all(1).any() else None  # it supports only padding
        return draw.frames(width_of(module.q_proj)), lambda m, x: m(x, distances, attention_mask=mask)[0]

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:  # fmt: skip
        size, zero = self.context_size, self.config.max_position_embeddings
        dropout_p = float(self.attention_dropout) if self.training else 0.0
        why = own_way(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        usual = why is None and once(
            "distances", position_embeddings, (size, zero), lambda: _usual(position_embeddings, size, zero)
        )
        if not usual:
            why = why or "distances of another order"
        bounds = bounds_or_reason(why, attention_mask, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return self.fall_back(bounds, hidden_states, position_embeddings, attention_mask, **kwargs)  # type: ignore[no-any-return]
        q, k, v = (
            f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = _in_blocks(self, q, k, v, bounds, zero, scale=self.scaling, dropout_p=dropout_p)
        return self.o_proj(merge_heads(out)), None


def _in_blocks(self: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, zero: int, **settings: Any) -> Tensor:
    """Return the attention in blocks, each of which sees only itself.

    zero: the row of the table that holds distance 0.
    """
    size = self.context_size
    rows = torch.arange(zero - size + 1, zero + size, device=q.device)  # distances 1 - size .. size - 1
    r = self.rel_pos_emb(rows).to(q.dtype).unsqueeze(0)
    window = self.setting("window")
    return attend(q, k, v, r, None, None, bounds, zero_row=size - 1, chunk=(size, 0), window=window, **settings)


def _usual(distances: Tensor, size: int, zero: int) -> bool:
    """Whether the entry for (i, j) is row i - j + zero of the table, as the encoder makes it."""
    if distances.shape != (size, size):
        return False
    at = torch.arange(size, device=distances.device)
    message = "attention_dists are of another order than those this compiled call was traced with"
    return holds((distances == at.unsqueeze(1) - at + zero).all(), message)


PEERS = (
    Peer("GraniteSpeech",
         "transformers.models.granite_speech.modeling_granite_speech.GraniteSpeechConformerAttention",
         Granite, "transformers", {"5.23.0": "4d8e826731537b94"}),
    Peer("GraniteSpeechPlus",
         "transformers.models.granite_speech_plus.modeling_granite_speech_plus.GraniteSpeechPlusConformerAttention",
         Granite, "transformers", {"5.23.0": "4d8e826731537b94"}),
    Peer("GraniteSpeech5",
         "transformers.models.granite_speech5.modeling_granite_speech5.GraniteSpeech5EncoderAttention",
         Granite5, "transformers", {"5.23.0": "166b72684ddd4bda"}),
)  # fmt: skip
