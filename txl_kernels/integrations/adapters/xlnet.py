"""transformers: XLNet (Yang et al. 2019).

Its third term depends on whether query and key are of one segment: e_s(i, j) = (q_i + s) . E_s with
s = 0 or 1. e_1 is the same for all keys of a query and cancels in the softmax; what is left,
(e_0 - e_1)_i for keys of i's own segment, is a product of one more feature a segment, one-hot.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.adapters.transformers import DISTRIBUTION, MODELS
from txl_kernels.integrations.attention import ALL, Bounds, attend, bounds_of, dropout_of, pad, same_for_all
from txl_kernels.integrations.peer import Peer
from txl_kernels.integrations.shared import holds, once

SEGMENTS = 8  # told apart in a text; features are added in eights


class XLNet(Accelerated):
    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Whether the model above feeds other encodings to halves of the batch."""
        return {"bi_data": any(getattr(getattr(m, "config", None), "bi_data", False) for m in ancestors)}

    def rel_attn_core(
        self: Any,
        q_head: Tensor,
        k_head_h: Tensor,
        v_head_h: Tensor,
        k_head_r: Tensor,
        seg_mat: Tensor | None = None,
        attn_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Any:
        given = (q_head, k_head_h, v_head_h, k_head_r, seg_mat, attn_mask, output_attentions)
        dropout_p = dropout_of(self.dropout)
        why = self.hindrance(q_head, dropout_p)
        if output_attentions:  # a pair is unpacked by the caller
            why = "attention weights asked for"
        keys, length = k_head_h.size(0), q_head.size(0)
        if attn_mask is None and k_head_r.size(0) < keys + length:
            why = "no mask, and no encodings of keys ahead"
        intervals: list[Bounds] | None = [ALL]
        if why is None and attn_mask is not None:
            intervals = once("mask", attn_mask, "xlnet", lambda: _intervals(attn_mask))
        features = None
        if why is None and seg_mat is not None:
            features = _segments(seg_mat[..., 0])
            why = "more segments in a text than 8" if features is None else None
        if why is not None or intervals is None:
            return self._core_fall_back(why or "a mask with holes", *given)
        # Row 0 is a distance that nobody is at.
        each_text = self.setting("bi_data") or (self.training and self.dropout.p > 0) or not same_for_all(k_head_r, 1)
        r = k_head_r[1:] if each_text else k_head_r[1:, :1]
        r = r.flip(0).permute(1, 2, 0, 3)  # [B or 1, H, T, D]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
        u, w = self.r_w_bias, self.r_r_bias
        if features is not None:
            of_queries, of_keys = features
            e = torch.einsum("bhid,shd->bhis", q + self.r_s_bias[:, None], self.seg_embed)
            own = (e[..., 0] - e[..., 1]).unsqueeze(-1) * of_queries.unsqueeze(1).to(q.dtype)
            q = torch.cat([q, own], -1)
            k = torch.cat([k, of_keys.unsqueeze(1).expand(-1, k.size(1), -1, -1).to(k.dtype)], -1)
            r, u, w = (pad(x, SEGMENTS) for x in (r, u, w))
        out = attend(
            q, k, v, r if each_text else r[0], u, w, *intervals, scale=self.scale,
            zero_row=r.size(-2) - k.size(2), dropout_p=dropout_p,
        )  # fmt: skip
        return out.permute(2, 0, 1, 3)

    def _core_fall_back(self: Any, why: str, *given: Any) -> Any:
        self.count(why)
        return self.original.rel_attn_core(self, *given)


def _intervals(mask: Tensor) -> list[Bounds] | None:
    """Disjoint intervals of keys that queries see, of a mask [q, k, B, 1], non-zero: hidden.

    None if there are more than these: one of the memory, one of the segment, and the query's own
    key, which XLNet leaves to tokens of padding.
    """
    seen = (mask[..., 0] == 0).permute(2, 0, 1)  # [B, q, k]
    whole = None if torch.compiler.is_compiling() else bounds_of(seen)
    if whole is not None:
        return [whole]
    length, keys = seen.shape[1:]
    earlier, own = seen[..., : keys - length], seen[..., keys - length :]
    alone = (own.sum(1) == 1) & own.diagonal(dim1=1, dim2=2)  # [B, q]: keys that only their own query sees
    rest, before = bounds_of(own & ~torch.diag_embed(alone)), bounds_of(earlier)
    if rest is None or before is None:
        return None
    at = torch.arange(keys - length, keys, dtype=torch.int32, device=mask.device)
    nobody = torch.zeros_like(at)
    itself = torch.where(alone, at, nobody), torch.where(alone, at + 1, nobody)
    start, end = (nobody[:1] if x is None else x + (keys - length) for x in rest)
    found: list[Bounds] = [(start, end), itself]
    return found if keys == length else [before, *found]


def _segments(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """One-hot segments of queries [B, q, 8] and of keys [B, k, 8]; None if there are more.

    matrix: [q, k, B], non-zero where query and key are of one segment.
    """
    same = matrix != 0
    length = same.size(0)
    own = same[:, same.size(1) - length :]
    leader = own.to(torch.int8).argmax(1)  # [q, B]: the first query of its segment
    leads = leader == torch.arange(length, device=same.device).unsqueeze(1)
    number = (leads.cumsum(0) - 1).gather(0, leader)
    message = "a text has more than 8 segments, of which a compiled txl_kernels knows nothing"
    if not holds((number < SEGMENTS).all(), message):
        return None
    of_queries = F.one_hot(number.clamp(max=SEGMENTS - 1), SEGMENTS).to(torch.float32)
    leaders = leads.unsqueeze(-1) * of_queries  # [q, B, 8]
    of_keys = torch.einsum("qkb,qbc->bkc", same.to(torch.float32), leaders)
    return of_queries.transpose(0, 1), of_keys


PEERS = (
    Peer("XLNet", f"{MODELS}.xlnet.modeling_xlnet.XLNetRelativeAttention", XLNet, DISTRIBUTION,
         {"5.23.0": "8401f1111d0f641c"}),
)  # fmt: skip
