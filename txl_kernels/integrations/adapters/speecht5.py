"""SpeechT5's encoder in transformers: Shaw's attention for keys (Shaw et al. 2018), with one table
of clamped distances that all layers and heads share.

The module of positions returns an object in place of encodings of all pairs. Layers read its table.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.adapters.lazy_tensor import LazyTensor
from txl_kernels.integrations.adapters.transformers import interface_bounds, peer
from txl_kernels.integrations.attention import attend, merge_heads, split_heads
from txl_kernels.integrations.peer import Accelerated


class SpeechT5Positions(Accelerated):
    needs = ("pe_k", "max_length")

    def forward(self: Any, hidden_states: Tensor) -> LazyTensor | str:
        why = self.why_not_kernel(hidden_states)
        if why is not None:
            return why  # type: ignore[no-any-return]
        table = self.pe_k(torch.arange(2 * self.max_length, device=hidden_states.device))  # farthest future first
        return LazyTensor(
            lambda: self.fall_back("encodings of all pairs are needed", hidden_states), table.device, table
        )


class SpeechT5(Accelerated):
    needs = ("q_proj", "k_proj", "v_proj", "out_proj", "num_heads", "scaling", "is_decoder")

    def forward(
        self: Any, hidden_states: Tensor, key_value_states: Tensor | None = None, cache: Any = None,
        attention_mask: Tensor | None = None, position_bias: Any = None, output_attentions: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        dropout_p = float(self.dropout) if self.training else 0.0
        why = self.why_not_kernel(hidden_states, dropout_p)
        length = hidden_states.size(1)
        if output_attentions and self.setting("weights") == "fallback":
            why = "attention weights asked for"
        elif key_value_states is not None or cache is not None or kwargs.get("past_key_values") is not None:
            why = "cross-attention, or a cache"
        elif not isinstance(position_bias, LazyTensor):
            why = why or "no encodings, or those of all pairs"
        elif attention_mask is not None and (
            attention_mask.dtype == torch.bool or attention_mask.size() != (hidden_states.size(0), 1, length, length)
        ):
            why = why or "a mask of another kind, which is added to scores, or of another shape"
        bounds = interface_bounds(why, attention_mask, length)
        if isinstance(bounds, str):
            return bounds
        q, k, v = (split_heads(f(hidden_states), self.num_heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        r = position_bias.source.to(q.dtype).unsqueeze(0)
        out = attend(
            q, k, v, r, None, None, bounds, zero_row=r.size(1) // 2, outside="clamp", scale=self.scaling,
            window=self.setting("window"), dropout_p=dropout_p,
        )  # fmt: skip
        return self.out_proj(merge_heads(out)), None


def _without_positions(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    own = bool(ancestors) and type(ancestors[-1]).__name__ == "SpeechT5EncoderLayer"
    return None if own else "no relative positions outside the encoder"


PEERS = (
    peer("SpeechT5", "speecht5.SpeechT5Attention", SpeechT5, {"5.24.0": "8fac1d511a04bc13"},
         why_nothing_to_do=_without_positions),
    peer("SpeechT5Positions", "speecht5.SpeechT5RelativePositionalEncoding", SpeechT5Positions,
         {"5.24.0": "cec02768f0a5214d"}),
)  # fmt: skip
