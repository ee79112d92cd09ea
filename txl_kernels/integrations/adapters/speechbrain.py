"""SpeechBrain's RelPosMHAXL. By default it returns attention weights; see `weights` of
`accelerate`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.integrations.attention import attend_encodings, bounds_or_reason, dropout_of
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class SpeechBrain(Accelerated):
    skips = ("dropout_att",)
    needs = ("in_proj_weight", "linear_pos", "pos_bias_u", "pos_bias_v", "vbias", "dropout_att")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table = inputs.table(width_of(module.linear_pos))
        padding, hidden = inputs.padding(seen), None if seen is None else ~seen[0]  # the first row has no padding
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, table, padding, hidden)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pos_embs: Tensor, key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None, return_attn_weights: bool = True,
    ) -> Any:  # fmt: skip
        dropout_p = dropout_of(self.dropout_att)
        why = self.why_not_kernel(query, dropout_p)
        if return_attn_weights and self.setting("weights") == "fallback":
            why = "attention weights asked for (accelerate(model, weights='none') answers None)"
        elif not (query is key and key is value):
            why = "queries, keys and values of different tensors"
        elif attn_mask is not None and (attn_mask.dim() != 2 or attn_mask.dtype != torch.bool):
            why = "an additive mask, or one for each head"
        bounds = bounds_or_reason(
            why, None if why is not None else _visible(key_padding_mask, attn_mask), keys=key.size(1)
        )
        if isinstance(bounds, str):
            return bounds
        heads, width = self.num_heads, self.head_dim
        fused = F.linear(query, self.in_proj_weight).unflatten(-1, (heads, 3 * width)).transpose(1, 2)
        q, k, v = fused.chunk(3, -1)
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(1, heads, 1, self.vhead_dim)
        u, w = (bias.view(heads, width) for bias in (self.pos_bias_u, self.pos_bias_v))  # stored [D, H], read as [H, D]
        out = attend_encodings(self, q, k, v, pos_embs, bounds, u=u, w=w, scale=self.scale, dropout_p=dropout_p)
        projected = self.out_proj(out)
        return (projected, None) if return_attn_weights else projected


def _visible(padding: Tensor | None, hidden: Tensor | None) -> Tensor | None:
    """Return where queries see keys, [B, L or 1, S], by a padding mask [B, S] and a mask [L, S],
    both True where hidden; None for all keys."""
    seen = None if padding is None else ~padding.bool().unsqueeze(1)
    if hidden is not None:
        seen = ~hidden.unsqueeze(0) if seen is None else seen & ~hidden
    return seen


PEERS = (
    Peer("SpeechBrainRelPosition", "speechbrain.nnet.attention.RelPosMHAXL", SpeechBrain, "speechbrain",
         {"0.5.16": "ade9cb898bba2481", "1.0.0": "c091e932d1886673", "1.0.3": "74f6a56cfa5ef3cf"}),
)  # fmt: skip
