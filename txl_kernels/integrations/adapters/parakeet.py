"""transformers: Parakeet's encoder, and Nemotron's, which streams with a cache of keys and
values."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.adapters.transformers import DISTRIBUTION, MODELS, bounds_or_reason, own_way
from txl_kernels.integrations.attention import (
    attend,
    merge_heads,
    project_table,
    same_for_all,
)
from txl_kernels.integrations.peer import Peer
from txl_kernels.integrations.streaming import again


class Parakeet(Accelerated):
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        given = dict(kwargs)
        if past_key_values is not None:
            given["past_key_values"] = past_key_values
        dropout_p = float(self.attention_dropout) if self.training else 0.0
        why = own_way(self, kwargs) or self.hindrance(hidden_states, dropout_p)
        if isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool:
            why = "a mask of numbers"
        bounds = bounds_or_reason(attention_mask) if why is None else why
        if isinstance(bounds, str):
            return self.fall_back(bounds, hidden_states, position_embeddings, attention_mask, **given)  # type: ignore[no-any-return]
        width = self.head_dim
        q, k, v = (
            f(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        r = self._table(position_embeddings, q.size(1), q.size(2))
        zero_row = r.size(-2) - k.size(2)  # of the table turned round
        k, v = (self._for_each_head(x) for x in (k, v))
        out = attend(
            q, k, v, r, self.bias_u, self.bias_v, bounds, zero_row=zero_row,
            scale=self.scaling, dropout_p=dropout_p,
        )  # fmt: skip
        return self.o_proj(merge_heads(out)), None

    def _table(self: Any, encodings: Tensor, heads: int, frames: int) -> Tensor:
        """r [H, T, D], or [B, H, T, D] where positions are dropped for each text."""
        dropped = self.training and getattr(self.config, "dropout_positions", 0.0) > 0
        if not dropped and same_for_all(encodings):
            encodings = encodings[:1]
        project = self.relative_k_proj
        (r,) = again(self, "r", (project,), encodings, frames, lambda: (project_table(project, encodings, heads),))
        return r

    def _for_each_head(self: Any, x: Tensor) -> Tensor:
        """Grouped keys and values, repeated."""
        groups = self.num_key_value_groups
        return x if groups == 1 else x.repeat_interleave(groups, 1)


PEERS = (
    Peer("ParakeetEncoder", f"{MODELS}.parakeet.modeling_parakeet.ParakeetEncoderAttention", Parakeet, DISTRIBUTION,
         {"5.23.0": "43da59579bfecd9f"}),
    Peer("NemotronStreaming",
         f"{MODELS}.nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention",
         Parakeet, DISTRIBUTION, {"5.23.0": "888fcac59116de2e"}),
)  # fmt: skip
