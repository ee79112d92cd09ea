"""MPT's attention in transformers: ALiBi (Press et al. 2022) as a bias of each key, [H, 1, S]. It
grows with the key's position as one of the distance does, so that the weights are the same."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.adapters.lazy_tensor import LazyTensor
from txl_kernels.integrations.adapters.transformers import check_keys, peer
from txl_kernels.integrations.attention import (
    attend,
    bounds_or_reason,
    condition_met,
    memoized,
    merge_heads,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated


class MPT(Accelerated):
    needs = ("Wqkv", "out_proj", "softmax_scale", "attn_dropout_p", "clip_qkv", "max_seq_length")

    def forward(
        self: Any, hidden_states: Tensor, position_bias: Any, cache: Any = None, attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any] | str:  # fmt: skip
        mask, length, window = attention_mask, hidden_states.size(1), self.setting("window")
        held = kwargs.get("past_key_values") if cache is None else cache  # the name of `cache` before 5.24
        dropout_p = float(self.attn_dropout_p) if self.training else 0.0
        why = self.why_not_kernel(hidden_states, dropout_p)
        if position_bias is None or not memoized("alibi", position_bias, None, lambda: _is_alibi(position_bias)):
            why = why or "biases that are not ALiBi's"
        elif mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or mask.size(1) != 1):
            why = why or "a mask of another kind, or for each head"
        bounds = bounds_or_reason(why, mask, lambda m: ~m[:, 0], keys=length if held is None else None)
        if isinstance(bounds, str):
            return bounds
        projected = self.Wqkv(hidden_states)
        limit = self.clip_qkv or None
        projected = projected if limit is None else projected.clamp(-limit, limit)
        q, k, v = (split_heads(x, self.n_heads) for x in projected.chunk(3, 2))
        if held is not None:
            last = (int(held.get_seq_length(self.layer_idx)) if window else 0) + length
            k, v = held.update(k, v, self.layer_idx, kwargs=kwargs)
            check_keys(mask, k.size(2))
            if window:  # a static cache has unused room behind the keys
                k, v = k[:, :, :last], v[:, :, :last]
            held = SimpleNamespace(update=lambda *_, **__: (k, v), get_seq_length=lambda *_: 0)
        biases = position_bias[:, 0, -2:-1] * torch.arange(1 - length, k.size(2), device=q.device)
        out = attend(
            q, k, v, None, None, None, bounds, r_bias=biases.to(q.dtype), zero_row=length - 1, scale=self.softmax_scale,
            position_scale=1.0, window=window, dropout_p=dropout_p,
        )  # fmt: skip
        # The original returns its weights in every call, which few callers use.
        given = (hidden_states, position_bias, held, mask)
        weights = LazyTensor(lambda: self.fall_back("attention weights asked for", *given)[1], q.device)
        return self.out_proj(merge_heads(out)), weights if self.setting("weights") == "fallback" else None


def _is_alibi(bias: Tensor) -> bool:
    """Whether a bias [H, 1, S] is a multiple of the key's position for each head, 0 at the last."""
    if bias.dim() != 3 or bias.size(1) != 1 or bias.size(2) < 2:
        return False
    at = torch.arange(bias.size(2) - 1, -1, -1, dtype=torch.int32, device=bias.device)
    return condition_met((at * bias[:, :, -2:-1] == bias).all(), "the bias is not ALiBi's")


PEERS = (peer("MPT", "mpt.MptAttention", MPT, {"5.24.0": "47a5d753e08a6bb3"}),)
