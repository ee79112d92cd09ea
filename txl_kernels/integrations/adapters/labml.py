"""labml's Transformer-XL, with a learned vector and a learned bias for each distance, [L, B, d]:
score = (q_i + u) . k_j + q_i . E_d + S_d."""

from typing import Any

from torch import Tensor

from txl_kernels.integrations.attention import OTHER_KEYS, attend, bounds_or_reason, dropout_of
from txl_kernels.integrations.peer import Accelerated, Peer


class Labml(Accelerated):
    skips = ("softmax", "dropout")
    needs = ("key_pos_embeddings", "key_pos_bias", "query_pos_bias")

    def forward(self: Any, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        dropout_p = dropout_of(self.dropout)
        why = self.reader_of_weights() or self.why_not_kernel(query, dropout_p)
        length, keys = query.size(0), key.size(0)
        if keys < length:
            why = "fewer keys than queries"
        elif keys + length > 2 * self.P:
            why = "more positions than its table has"
        elif mask is not None and mask.size(1) != keys:
            why = OTHER_KEYS
        bounds = bounds_or_reason(why, mask, _visible, keys=None)
        if isinstance(bounds, str):
            return self.fall_back(bounds, query=query, key=key, value=value, mask=mask)  # type: ignore[no-any-return]
        q, k, v = (f(x).permute(1, 2, 0, 3) for f, x in ((self.query, query), (self.key, key), (self.value, value)))
        rows = slice(self.P - keys + 1, self.P + length)  # row P - d, for distances keys - 1 .. 1 - length
        r = self.key_pos_embeddings[rows].flip(0).transpose(0, 1)
        bias = self.key_pos_bias[rows].flip(0).transpose(0, 1)
        out = attend(
            q, k, v, r, self.query_pos_bias, None, bounds, r_bias=bias, scale=self.scale, dropout_p=dropout_p,
            window=self.setting("window"),
        )  # fmt: skip
        self.attn = None  # the original stores its weights here
        return self.output(out.permute(2, 0, 1, 3).flatten(-2))  # type: ignore[no-any-return]


def _visible(mask: Tensor) -> Tensor:
    """Convert a mask [L, S, 1 or B], non-zero where visible, to bool [1 or B, L, S]."""
    return (mask != 0).permute(2, 0, 1)


PEERS = (
    Peer("LabmlRelative", "labml_nn.transformers.xl.relative_mha.RelativeMultiHeadAttention", Labml, "labml-nn",
         {"0.5.1": "f6d34b9b04176bbc"}),
)  # fmt: skip
