"""enformer-pytorch: Enformer's attention (Avsec et al. 2021). It is the paper's formula with values
of another width, and with basis functions instead of sinusoids. It has no masks."""

import sys
from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import ALL, attend, dropout_of, merge_heads, split_heads, within
from txl_kernels.integrations.peer import Accelerated, Draw, Peer, Sample, width_of


class Enformer(Accelerated):
    skips = ("attn_dropout",)
    needs = ("to_rel_k", "rel_content_bias", "rel_pos_bias", "num_rel_pos_features", "use_tf_gamma")

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample | None:
        if module.use_tf_gamma:  # its table has 1,536 positions
            return None
        return draw.frames(width_of(module.to_q)), lambda m, x: m(x)

    def forward(self: Any, x: Tensor) -> Tensor:
        dropout_p = dropout_of(self.attn_dropout)
        why = self.why_not_kernel(x, dropout_p)
        if why is not None:
            return self.fall_back(why, x)  # type: ignore[no-any-return]
        length, heads = x.size(-2), self.heads
        q, k, v = (split_heads(f(x), heads) for f in (self.to_q, self.to_k, self.to_v))
        features = sys.modules[self.original.__module__].get_positional_embed(
            length,
            self.num_rel_pos_features,
            x.device,
            use_tf_gamma=self.use_tf_gamma,
            dtype=torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype,
        )  # row 0 belongs to a key length - 1 before its query
        window = self.setting("window")
        features, past = within(window, self.pos_dropout(features), length - 1)
        r = self.to_rel_k(features.flip(0)).unflatten(-1, (heads, -1)).transpose(0, 1)
        # The original adds its biases to queries that are already scaled.
        u, w = (bias.flatten(0, 2) / self.scale for bias in (self.rel_content_bias, self.rel_pos_bias))
        out = attend(
            q, k, v, r, u, w, ALL, past=past, window=window, scale=self.scale, dropout_p=dropout_p
        )  # fmt: skip
        return self.to_out(merge_heads(out))  # type: ignore[no-any-return]


PEERS = (
    Peer("Enformer", "enformer_pytorch.modeling_enformer.Attention", Enformer, "enformer-pytorch",
         {"0.8.12": "9c729bfc098b10c5"}),
)  # fmt: skip
