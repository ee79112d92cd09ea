"""MPNet's self-attention in transformers (Song et al. 2020): a relative bias from a table of
buckets, which the encoder computes and passes to all layers.

The accelerated encoder passes a bias for each distance, [H, T], instead of one for all pairs.
"""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.adapters.shared_bias import all_pairs, farthest_first
from txl_kernels.integrations.adapters.transformers import interface_bounds, peer
from txl_kernels.integrations.attention import attend, dropout_of, merge_heads, split_heads
from txl_kernels.integrations.peer import Accelerated, RandomInputs, Sample, width_of


class MPNet(Accelerated):
    converts = True
    skips = ("dropout",)

    @staticmethod
    def mask_forms(module: Any) -> tuple[str, ...]:
        return ("additive",)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        own, mask = inputs.normal(module.num_attention_heads, 2 * inputs.T - 1), inputs.mask(seen)

        def call(m: Any, x: Tensor) -> Any:
            bias = own if isinstance(m, Accelerated) else all_pairs(own, inputs.T).unsqueeze(0)
            return m(x, mask, bias)

        return inputs.frames(width_of(module.q)), call

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
        output_attentions: bool = False, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(hidden_states, dropout_p)
        if output_attentions:  # the caller unpacks them
            why = "attention weights asked for"
        elif position_bias is None or position_bias.dim() != 2:
            why = why or "biases of all pairs, of an encoder that is not accelerated"
        elif attention_mask is not None and attention_mask.dtype == torch.bool:
            why = why or "a bool mask, which the original adds to scores"
        bounds = interface_bounds(why, attention_mask, hidden_states.size(1))
        if isinstance(bounds, str) or position_bias is None:
            bias = position_bias
            if bias is not None and bias.dim() == 2:
                bias = all_pairs(bias, hidden_states.size(1))
            return self.fall_back(str(bounds), hidden_states, attention_mask, bias, output_attentions, **kwargs)  # type: ignore[no-any-return]
        q, k, v = (split_heads(f(hidden_states), width=self.attention_head_size) for f in (self.q, self.k, self.v))
        out = attend(
            q, k, v, None, None, None, bounds, r_bias=position_bias.to(q.dtype), zero_row=q.size(2) - 1,
            position_scale=1.0, dropout_p=dropout_p, window=self.setting("window"),
        )  # fmt: skip
        return (self.o(merge_heads(out)),)


class MPNetBiases(Accelerated):
    """The encoder's computation of the biases."""

    method = "compute_position_bias"
    omitted = ("layer",)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        def call(m: Any, x: Tensor) -> Tensor:
            bias: Tensor = m.compute_position_bias(x)
            if isinstance(m, Accelerated):
                bias = all_pairs(bias, inputs.T).unsqueeze(0)
            return bias.expand(inputs.B, -1, -1, -1)

        return inputs.frames(8), call

    def compute_position_bias(
        self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor | str:
        why = self.why_not_kernel(x)
        if why is None and position_ids is not None:
            why = "positions of its own for each token"
        if why is None and not all(isinstance(layer.attention.attn, MPNet) for layer in self.layer):
            why = "a layer of its stack is not accelerated"
        if why is not None:
            return why  # type: ignore[no-any-return]
        buckets = self.relative_position_bucket(farthest_first(x.size(1), x.device), num_buckets=num_buckets)
        biases: Tensor = self.relative_attention_bias(buckets)
        return biases.t()


PEERS = (
    peer("MPNet", "mpnet.MPNetSelfAttention", MPNet, {"5.24.0": "d4a5427e2e0e04d0"}),
    peer("MPNetBiases", "mpnet.MPNetEncoder", MPNetBiases, {"5.24.0": "c3e57bd4f645d35e"}),
)
