"""ESPnet's relative attentions, and FunASR's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.integrations.attention import (
    Bounds,
    attend,
    attend_encodings,
    bounds_or_reason,
    crop,
    dropout_of,
    first_if_same,
    merge_heads,
    project_table,
)
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of
from txl_kernels.integrations.streaming import cached


class ESPnet(Accelerated):
    """The newer relative attention, whose table has distances on both sides, also FunASR's."""

    skips = ("dropout",)
    needs = ("forward_qkv", "linear_pos", "pos_bias_u", "pos_bias_v", "zero_triu", "h")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table, mask = inputs.table(width_of(module.linear_pos)), None if seen is None else inputs.narrow(seen)
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, table, mask)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None
    ) -> Tensor | str:
        why = None if query.size(1) == key.size(1) else "queries and keys of different lengths"
        return _answer(self, why, query, key, value, pos_emb, mask, zero_future=self.zero_triu)


class ESPnetLegacy(Accelerated):
    """The first relative attention, still the default of the encoders, whose shift wraps around.

    With rows r_0 .. r_(T-1), the position score of key j for query i is

        j <= i:     (q_i + v) . r_(i - j)
        j  = i + 1: 0
        j >  i + 1: (q_(i+1) + v) . r_(T + 1 + i - j)

    so keys after the query use the next query's features. Both queries, concatenated along the
    width, and a table of twice the width give the same scores.
    """

    skips = ("dropout",)
    needs = ESPnet.needs

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table = inputs.table(width_of(module.linear_pos), future=0)
        mask = None if seen is None else inputs.narrow(seen)
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, table, mask)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None
    ) -> Tensor | str:
        why = "zero_triu" if self.zero_triu else None
        if query.size(1) != key.size(1) or pos_emb.size(1) != key.size(1):
            why = "queries, keys and encodings of different lengths"
        return _answer(self, why, query, key, value, pos_emb, mask, _attend_wrapped)


def _attend_wrapped(
    self: Any, q: Tensor, k: Tensor, v: Tensor, pos_emb: Tensor, bounds: Bounds, dropout_p: float
) -> Tensor:
    length, width = q.size(2), q.size(3)
    r = project_table(self.linear_pos, pos_emb, self.h)  # distances 0 .. T - 1
    own = F.pad(r, (0, 0, length - 1, 0))  # distances 1 - T .. T - 1
    ahead = F.pad(r[..., 2:, :], (0, 0, 0, length + 1))[..., : 2 * length - 1, :]  # d <= -2: r_(T + 1 + d)
    following = F.pad(q[:, :, 1:], (0, 0, 0, 1))
    k, u = (F.pad(x, (0, width)) for x in (k, self.pos_bias_u))
    out = attend(
        torch.cat([q, following], -1), k, v, torch.cat([own, ahead], -1), u,
        torch.cat([self.pos_bias_v, self.pos_bias_v], -1), bounds, scale=width**-0.5, dropout_p=dropout_p,
        window=self.setting("window"),
    )  # fmt: skip
    return merge_heads(out)


class ESPnetTransducer(Accelerated):
    """The attention of ESPnet2's transducer encoder, and of FunASR's chunks: a padding mask, a
    chunk mask, and a number of frames of left context.

    With simplified scores its linear_pos gives a bias for each head and distance, and it has no
    other positional terms.
    """

    skips = ("dropout",)
    needs = ("forward_qkv", "linear_pos", "num_heads", "compute_att_score")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table = inputs.table(width_of(module.linear_pos))
        padding, hidden = inputs.padding(seen), None if seen is None else ~seen[0]

        def call(m: Any, x: Tensor) -> Tensor:
            keys = x.roll(1, 0) if seen is None else x  # while it streams, keys are another tensor
            out: Tensor = m(x, keys, keys, table, padding, hidden)
            return out

        return inputs.frames(width_of(module.linear_pos)), call

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pos_enc: Tensor, mask: Tensor,
        chunk_mask: Tensor | None = None, left_context: int = 0,
    ) -> Tensor | str:  # fmt: skip
        seen = ~mask.bool().unsqueeze(1)
        if chunk_mask is not None:
            seen = seen & ~chunk_mask.bool()
        if hasattr(self, "pos_bias_u"):
            return _answer(self, None, query, key, value, pos_enc, seen)
        shared = first_if_same(pos_enc)
        why = "encodings that differ between batch rows" if shared is None else None
        return _answer(self, why, query, key, value, pos_enc if shared is None else shared, seen, _attend_biases)


def _attend_biases(
    self: Any, q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, bounds: Bounds, dropout_p: float
) -> Tensor:
    window = self.setting("window")
    rows, past = crop(window, encodings, k.size(2) - 1)
    (bias,) = cached(self, "r", (self.linear_pos,), rows, q.size(2), lambda: (self.linear_pos(rows.flip(-2))[0].t(),))
    out = attend(
        q, k, v, None, None, None, bounds, r_bias=bias, zero_row=bias.size(1) - 1 - past, window=window, dropout_p=dropout_p
    )  # fmt: skip
    return merge_heads(out)


def _answer(
    self: Any, why: str | None, query: Tensor, key: Tensor, value: Tensor, encodings: Tensor, mask: Tensor | None,
    attention: Callable[..., Tensor] = attend_encodings, **settings: Any,
) -> Tensor | str:  # fmt: skip
    """Return a module's output, or the reason why the original must answer: `why`, if it is not
    None.

    mask: True, or not zero, where a query sees a key.
    """
    dropout_p = dropout_of(self.dropout)
    why = why or self.why_weights_needed() or self.why_not_kernel(query, dropout_p)
    bounds = bounds_or_reason(why, mask, Tensor.bool, keys=key.size(1))
    if isinstance(bounds, str):
        return bounds
    q, k, v = self.forward_qkv(query, key, value)
    out = attention(self, q, k, v, encodings, bounds, dropout_p=dropout_p, **settings)
    self.attn = None  # the original stores its weights here
    return self.linear_out(out)  # type: ignore[no-any-return]


PEERS = (
    Peer("ESPnetRelPosition", "espnet.nets.pytorch_backend.transformer.attention.RelPositionMultiHeadedAttention",
         ESPnet, "espnet", {"202209": "9a06c25cc7c811b1", "202412": "2410bed83a59b045", "202509": "2c32d1700ee6ff95"}),
    Peer("FunASRRelPosition", "funasr.models.transformer.attention.RelPositionMultiHeadedAttention", ESPnet, "funasr",
         {"1.0.30": "f008e69e468f9fc3", "1.4.16": "6e78447a905304cf"}),
    Peer("ESPnetLegacyRelPosition",
         "espnet.nets.pytorch_backend.transformer.attention.LegacyRelPositionMultiHeadedAttention",
         ESPnetLegacy, "espnet", {"202209": "17665c8d1244775e", "202412": "cc4a1a6e564f6273", "202509": "3820d7e3af19a0e7"}),
    Peer("FunASRLegacyRelPosition", "funasr.models.transformer.attention.LegacyRelPositionMultiHeadedAttention",
         ESPnetLegacy, "funasr", {"1.0.30": "a0fed56b91fc43d8", "1.4.16": "6819d019dc601b45"}),
    Peer("FunASRChunk", "funasr.models.transformer.attention.RelPositionMultiHeadedAttentionChunk", ESPnetTransducer,
         "funasr", {"1.0.30": "27f7575a496d4222", "1.4.16": "664e042f54d49cf8"}),
    Peer("ESPnetTransducer", "espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention",
         ESPnetTransducer, "espnet", {"202301": "27f7575a496d4222"}),
)  # fmt: skip
