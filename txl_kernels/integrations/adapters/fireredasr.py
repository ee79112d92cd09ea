"""FireRedASR's Conformer. It always returns its attention weights, although no caller reads them;
see `weights` of `accelerate`."""

from typing import Any

from torch import Tensor

from txl_kernels.integrations.attention import attend_encodings, bounds_or_reason, dropout_of
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class FireRed(Accelerated):
    skips = ("attention", "attention.dropout")
    needs = ("forward_qkv", "layer_norm_q", "linear_pos", "pos_bias_u", "pos_bias_v", "attention", "fc")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table, mask = inputs.table(width_of(module.linear_pos)), None if seen is None else inputs.narrow(seen)
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, table, mask=mask)[0]

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, pos_emb: Tensor, mask: Tensor | None = None) -> Any:
        dropout_p = dropout_of(self.attention.dropout)
        why = self.why_not_kernel(q, dropout_p)
        if self.setting("weights") == "fallback":
            why = "attention weights asked for (accelerate(model, weights='none') answers None)"
        elif q.size(1) != k.size(1):
            why = "queries and keys of different lengths"
        bounds = bounds_or_reason(why, mask, Tensor.bool, keys=k.size(1))
        if isinstance(bounds, str):
            return bounds
        residual = q
        q, k, v = self.forward_qkv(q, k, v)
        out = attend_encodings(self, q, k, v, pos_emb, bounds, scale=self.scale, dropout_p=dropout_p)
        return self.dropout(self.fc(out)) + residual, None


PEERS = (
    Peer("FireRedASR", "fireredasr.models.module.conformer_encoder.RelPosMultiHeadAttention", FireRed, "fireredasr",
         {"0.0.2": "28307756dedd8a29"}),
)  # fmt: skip
