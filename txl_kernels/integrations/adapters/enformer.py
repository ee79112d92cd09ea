"""enformer-pytorch: Enformer's attention (Avsec et al. 2021). It is the paper's formula with values
of another width, and with basis functions instead of sinusoids. It has no masks."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import ALL, attend_encodings, dropout_of, split_heads
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class Enformer(Accelerated):
    skips = ("attn_dropout",)
    needs = ("to_rel_k", "rel_content_bias", "rel_pos_bias", "num_rel_pos_features", "use_tf_gamma")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample | None:
        if module.use_tf_gamma:  # its table has 1,536 positions
            return None
        return inputs.frames(width_of(module.to_q)), lambda m, x: m(x)

    def forward(self: Any, x: Tensor) -> Tensor | str:
        dropout_p = dropout_of(self.attn_dropout)
        why = self.why_not_kernel(x, dropout_p)
        if why is not None:
            return why  # type: ignore[no-any-return]
        q, k, v = (split_heads(f(x), self.heads) for f in (self.to_q, self.to_k, self.to_v))
        features = self.beside.get_positional_embed(
            x.size(-2),
            self.num_rel_pos_features,
            x.device,
            use_tf_gamma=self.use_tf_gamma,
            dtype=torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype,
        )  # row 0 belongs to the key farthest before its query
        # The original adds its biases to queries that are already scaled.
        u, w = (bias.flatten(0, 2) / self.scale for bias in (self.rel_content_bias, self.rel_pos_bias))
        out = attend_encodings(
            self, q, k, v, self.pos_dropout(features), ALL, self.to_rel_k, u, w, scale=self.scale, dropout_p=dropout_p
        )
        return self.to_out(out)  # type: ignore[no-any-return]


PEERS = (
    Peer("Enformer", "enformer_pytorch.modeling_enformer.Attention", Enformer, "enformer-pytorch",
         {"0.8.12": "9c729bfc098b10c5"}),
)  # fmt: skip
