"""ESPnet's first relative attention, still its encoders' default, whose shift wraps around.

With rows r_0 .. r_(T-1) the position score of key j for query i takes

    j <= i:     (q_i + v) . r_(i - j)
    j  = i + 1: 0
    j >  i + 1: (q_(i+1) + v) . r_(T + 1 + i - j)

so keys ahead meet the next query's features. Two queries in one of twice the width say that.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.attention import (
    attend,
    dropout_of,
    mask_bounds,
    merge_heads,
    nonzero,
    pad,
    project_table,
)
from txl_kernels.integrations.peer import Peer


class ESPnetLegacy(Accelerated):
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None) -> Tensor:
        dropout_p = dropout_of(self.dropout)
        why = self.reader_of_weights() or self.hindrance(query, dropout_p)
        if query.size(1) != key.size(1) or pos_emb.size(1) != key.size(1):
            why = "queries, keys and encodings of different lengths"
        elif self.zero_triu:
            why = "zero_triu"
        bounds = mask_bounds(mask, nonzero) if why is None else None
        if bounds is None:
            return self.fall_back(why or "a mask with holes", query, key, value, pos_emb, mask)  # type: ignore[no-any-return]
        q, k, v = self.forward_qkv(query, key, value)
        length, width = q.size(2), q.size(3)
        r = project_table(self.linear_pos, pos_emb, self.h)  # distances 0 .. T - 1
        own = F.pad(r, (0, 0, length - 1, 0))  # distances 1 - T .. T - 1
        ahead = F.pad(r[..., 2:, :], (0, 0, 0, length + 1))[..., : 2 * length - 1, :]  # d <= -2: r_(T + 1 + d)
        following = F.pad(q[:, :, 1:], (0, 0, 0, 1))
        out = attend(
            torch.cat([q, following], -1), pad(k, width), v, torch.cat([own, ahead], -1), pad(self.pos_bias_u, width),
            torch.cat([self.pos_bias_v, self.pos_bias_v], -1), bounds, scale=width**-0.5, zero_row=length - 1,
            dropout_p=dropout_p,
        )  # fmt: skip
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


PEERS = (
    Peer("ESPnetLegacyRelPosition",
         "espnet.nets.pytorch_backend.transformer.attention.LegacyRelPositionMultiHeadedAttention",
         ESPnetLegacy, "espnet", {"202511": "e5986b1e411caaaa"}),
)  # fmt: skip
