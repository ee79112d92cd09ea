"""T5's self-attention in transformers, of encoders and decoders (Raffel et al. 2020): a relative
bias for each head from a table of buckets, and no scale.

The original's first layer computes biases [1, H, L, S] and passes them from layer to layer. The
adapter passes [1, H, T], a bias for each distance, if all layers of the stack are accelerated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.adapters.transformers import bounds_or_reason, own_way
from txl_kernels.integrations.attention import attend, merge_heads
from txl_kernels.integrations.peer import Accelerated, Peer
from txl_kernels.positions import t5_bucket_numbers


class T5(Accelerated):
    needs = ("q", "k", "v", "o", "key_value_proj_dim", "has_relative_attention_bias", "relative_attention_max_distance")

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Return a dict that all layers of the stack share. Its entry "whole" is True if all of
        them are accelerated. It holds no reference to a layer."""
        stack = _stack(ancestors)
        if not stack:
            return {}
        found: list[dict[str, bool] | None] = [x.setting("layers") for x in stack if isinstance(x, T5)]
        shared = next((layers for layers in found if layers is not None), {})
        shared["whole"] = len(found) == len(stack)
        return {"layers": shared}

    def released(self) -> None:
        layers = self.setting("layers")
        if layers is not None:
            layers["whole"] = False

    def forward(
        self: Any,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dropout_p = float(self.dropout) if self.training else 0.0
        implementation = getattr(self.config, "_attn_implementation", None) or "eager"
        why = own_way(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        if why is None:
            why = self._unlike(key_value_states, position_bias, implementation)
        bounds = bounds_or_reason(mask) if why is None else why
        if isinstance(bounds, str):
            named = {"past_key_values": past_key_values, "cache": cache}  # `cache` is the new name since 5.24
            named = {name: x for name, x in named.items() if x is not None}
            bias = _of_all_pairs(position_bias, hidden_states.size(1))
            out, made, weights = self.fall_back(bounds, hidden_states, mask, key_value_states, bias, **named, **kwargs)
            return out, made if position_bias is None else position_bias, weights
        length = hidden_states.size(1)
        q, k, v = (
            f(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        held = cache if past_key_values is None else past_key_values
        seen: Any = 0
        if held is not None:
            seen = held.get_seq_length(self.layer_idx)
            seen = seen.clone() if isinstance(seen, Tensor) else seen  # a static cache counts in place
            k, v = getattr(held, "self_attention_cache", held).update(k, v, self.layer_idx)
        causal = (
            mask is None and length > 1 and implementation == "sdpa" and bool(kwargs.get("is_causal", self.is_causal))
        )
        window = self.setting("window")
        if causal or (window is not None and held is not None):  # a static cache has unused room behind the keys
            keys = length if causal else int(seen) + length
            k, v = k[:, :, :keys], v[:, :, :keys]
        if position_bias is None:
            position_bias = self._numbers(length, k.size(2), seen, q.device)
        out = attend(
            q, k, v, None, None, None, bounds, r_bias=position_bias[0].to(q.dtype), zero_row=length - 1, scale=1.0,
            causal=causal, window=window, dropout_p=dropout_p,
        )  # fmt: skip
        return self.o(merge_heads(out)), position_bias, None

    def _unlike(self: Any, others: Tensor | None, bias: Tensor | None, implementation: str) -> str | None:
        """Return the reason why the original must answer a call, or None."""
        if others is not None:
            return "cross-attention"
        if implementation not in ("eager", "sdpa"):
            return f"an attention implementation that masks otherwise, {implementation!r}"
        if bias is not None:
            return None if bias.dim() == 3 else "biases of all pairs, of a layer that the original answered"
        if not self.has_relative_attention_bias:
            return "no table of biases"
        layers = self.setting("layers")
        return None if layers is not None and layers["whole"] else "another layer of its stack is not accelerated"

    def _numbers(self: Any, length: int, keys: int, seen: int | Tensor, device: torch.device) -> Tensor:
        """Return biases [1, H, T] of the distances that `attend` expects, farthest future first.
        They are shifted so that the last key is at the last query, also for a static cache, which
        has unused room behind the keys."""
        distances = torch.arange(1 - length, keys, device=device) + (seen - (keys - length))
        buckets = t5_bucket_numbers(
            self.relative_attention_num_buckets, distances, not self.is_decoder, self.relative_attention_max_distance
        )
        biases: Tensor = self.relative_attention_bias(buckets)  # [T, H]
        return biases.t().unsqueeze(0)


def _of_all_pairs(bias: Tensor | None, length: int) -> Tensor | None:
    """Expand biases [1, H, T] to [1, H, L, S], as the original expects them."""
    if bias is None or bias.dim() != 3:
        return bias
    keys = bias.size(-1) + 1 - length
    at = torch.arange(length, device=bias.device).unsqueeze(1) - torch.arange(keys, device=bias.device)
    return bias[..., at + (keys - 1)]


def _stack(ancestors: Sequence[nn.Module]) -> list[nn.Module]:
    for module in reversed(ancestors):
        blocks = getattr(module, "block", None)
        if isinstance(blocks, nn.ModuleList):
            layers: list[Any] = list(blocks)
            return [block.layer[0].SelfAttention for block in layers]
    return []


def _why_not_module(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    if any(module is x for x in _stack(ancestors)):
        return None
    return "the stack whose layers share its biases is not at hand: accelerate the model that holds it"


def _across(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    crossing = bool(ancestors) and getattr(ancestors[-1], "EncDecAttention", None) is module
    return "cross-attention, which has no relative positions" if crossing else None


PEERS = (
    Peer("T5", "transformers.models.t5.modeling_t5.T5Attention", T5, "transformers",
         {"5.23.0": "fe1088cb009f7b48", "5.24.0": "b71ea11c679bbb47"}, why_not_module=_why_not_module, other=_across),
    Peer("MT5", "transformers.models.mt5.modeling_mt5.MT5Attention", T5, "transformers",
         {"5.23.0": "6d1e3bce068bec0c", "5.24.0": "b97397c624c1ecdb"}, why_not_module=_why_not_module, other=_across),
)  # fmt: skip
