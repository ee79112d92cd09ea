"""ESPnet: its relative attentions, and FunASR's."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.attention import (
    attend_table,
    dropout_of,
    mask_bounds,
    merge_heads,
    nonzero,
    pad,
    project_table,
)
from txl_kernels.integrations.peer import Accelerated, Peer


class ESPnet(Accelerated):
    """The newer relative attention, whose table has distances on both sides; FunASR's, too."""

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
        out = attend_table(q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, dropout_p=dropout_p)
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


class ESPnetLegacy(Accelerated):
    """The first relative attention, still the encoders' default, whose shift wraps around.

    With rows r_0 .. r_(T-1) the position score of key j for query i takes

        j <= i:     (q_i + v) . r_(i - j)
        j  = i + 1: 0
        j >  i + 1: (q_(i+1) + v) . r_(T + 1 + i - j)

    so keys ahead meet the next query's features. Two queries in one of twice the width say that.
    """

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
        out = attend_table(
            torch.cat([q, following], -1), pad(k, width), v, torch.cat([own, ahead], -1), pad(self.pos_bias_u, width),
            torch.cat([self.pos_bias_v, self.pos_bias_v], -1), bounds, scale=width**-0.5, dropout_p=dropout_p,
        )  # fmt: skip
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


class ESPnetTransducer(Accelerated):
    """ESPnet2's transducer encoder: a padding mask, a chunk mask, and frames of left context."""

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pos_enc: Tensor, mask: Tensor,
        chunk_mask: Tensor | None = None, left_context: int = 0,
    ) -> Tensor:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.reader_of_weights() or self.hindrance(query, dropout_p)
        seen = ~mask.bool().unsqueeze(1)
        if chunk_mask is not None:
            seen = seen & ~chunk_mask.bool()
        bounds = mask_bounds(seen) if why is None else None
        if bounds is None:
            why = why or "a mask with holes"
            return self.fall_back(why, query, key, value, pos_enc, mask, chunk_mask, left_context)  # type: ignore[no-any-return]
        q, k, v = self.forward_qkv(query, key, value)
        r = project_table(self.linear_pos, pos_enc, self.num_heads)
        out = attend_table(q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, dropout_p=dropout_p)
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


def _refuses(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None if hasattr(module, "pos_bias_u") else "simplified_attention_score"


PEERS = (
    Peer("ESPnetRelPosition", "espnet.nets.pytorch_backend.transformer.attention.RelPositionMultiHeadedAttention",
         ESPnet, "espnet", {"202511": "3312566e4cd442b6"}),
    Peer("FunASRRelPosition", "funasr.models.transformer.attention.RelPositionMultiHeadedAttention", ESPnet, "funasr",
         {"1.4.16": "4fb5ad69bc12f204"}),
    Peer("ESPnetLegacyRelPosition",
         "espnet.nets.pytorch_backend.transformer.attention.LegacyRelPositionMultiHeadedAttention",
         ESPnetLegacy, "espnet", {"202511": "e5986b1e411caaaa"}),
    Peer("ESPnetTransducer", "espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention",
         ESPnetTransducer, "espnet", {"202511": "8c5dbb051fc7adcb"}, refuses=_refuses),
)  # fmt: skip
