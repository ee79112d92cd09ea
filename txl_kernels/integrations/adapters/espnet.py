"""ESPnet and FunASR: the newer relative attention, whose table has distances on both sides."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.attention import (
    attend,
    dropout_of,
    mask_bounds,
    merge_heads,
    nonzero,
    project_table,
)
from txl_kernels.integrations.peer import Peer


class ESPnet(Accelerated):
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None) -> Tensor:
        dropout_p = dropout_of(self.dropout)
        why = self.reader_of_weights() or self.hindrance(query, dropout_p)
        if query.size(1) != key.size(1):
            why = "queries and keys of different lengths"
        bounds = mask_bounds(mask, nonzero) if why is None else None
        if bounds is None:
            return self.fall_back(why or "a mask with holes", query, key, value, pos_emb, mask)  # type: ignore[no-any-return]
        q, k, v = self.forward_qkv(query, key, value)
        r = project_table(self.linear_pos, pos_emb, self.h)
        length = q.size(2)
        if self.zero_triu:  # (b) and (d) are 0 for keys ahead
            r = torch.cat([torch.zeros_like(r[..., : length - 1, :]), r[..., length - 1 :, :]], -2)
        out = attend(
            q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, zero_row=length - 1,
            dropout_p=dropout_p,
        )  # fmt: skip
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


PEERS = (
    Peer("ESPnetRelPosition", "espnet.nets.pytorch_backend.transformer.attention.RelPositionMultiHeadedAttention",
         ESPnet, "espnet", {"202511": "3312566e4cd442b6"}),
    Peer("FunASRRelPosition", "funasr.models.transformer.attention.RelPositionMultiHeadedAttention", ESPnet, "funasr",
         {"1.4.16": "4fb5ad69bc12f204"}),
)  # fmt: skip
