"""Granite Speech of transformers: Shaw's relative attention, one table for all heads, in blocks
that see themselves alone. There are no masks."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import ALL, attend, holds, merge_heads, once, split_heads
from txl_kernels.integrations.peer import Accelerated, Draw, Peer, Sample


class Granite(Accelerated):
    needs = ("pre_norm", "to_q", "to_kv", "rel_pos_emb", "context_size", "max_pos_emb")

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample:
        size, at = module.context_size, torch.arange(module.context_size)
        distances = at.unsqueeze(1) - at + module.max_pos_emb
        return draw.normal(draw.B, 2 * size + 3, module.to_q.in_features), lambda m, x: m(x, distances)

    def forward(self: Any, hidden_states: Tensor, attention_dists: Tensor) -> Tensor:
        size, zero = self.context_size, self.max_pos_emb
        why = self.hindrance(hidden_states)
        usual = why is None and once(
            "distances", attention_dists, (size, zero), lambda: _usual(attention_dists, size, zero)
        )
        if not usual:
            return self.fall_back(why or "distances of another order", hidden_states, attention_dists)  # type: ignore[no-any-return]
        x = self.pre_norm(hidden_states)
        keys, values = self.to_kv(x).chunk(2, -1)
        q, k, v = (split_heads(y, self.num_heads) for y in (self.to_q(x), keys, values))
        r = self.rel_pos_emb.weight[zero - size + 1 : zero + size].to(q.dtype).unsqueeze(0)  # 1 - size .. size - 1
        out = attend(
            q, k, v, r, None, None, ALL, zero_row=size - 1, chunk=(size, 0), scale=self.scale,
            window=self.setting("window"),
        )  # fmt: skip
        return self.dropout(self.to_out(merge_heads(out)))  # type: ignore[no-any-return]


def _usual(distances: Tensor, size: int, zero: int) -> bool:
    """Whether rows of the table are given for i - j, as the encoder gives them."""
    if distances.shape != (size, size):
        return False
    at = torch.arange(size, device=distances.device)
    message = "attention_dists are of another order, of which a compiled txl_kernels knows nothing"
    return holds((distances == at.unsqueeze(1) - at + zero).all(), message)


PEERS = (
    Peer("GraniteSpeech",
         "transformers.models.granite_speech.modeling_granite_speech.GraniteSpeechConformerAttention",
         Granite, "transformers", {"5.23.0": "4d8e826731537b94"}),
    Peer("GraniteSpeechPlus",
         "transformers.models.granite_speech_plus.modeling_granite_speech_plus.GraniteSpeechPlusConformerAttention",
         Granite, "transformers", {"5.23.0": "4d8e826731537b94"}),
)  # fmt: skip
