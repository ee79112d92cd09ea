"""ESPnet2's transducer encoder: a padding mask, a chunk mask, and frames of left context."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.attention import attend, dropout_of, mask_bounds, merge_heads, project_table
from txl_kernels.integrations.peer import Peer


class ESPnetTransducer(Accelerated):
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
        out = attend(
            q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, zero_row=r.size(-2) - k.size(2),
            dropout_p=dropout_p,
        )  # fmt: skip
        self.attn = None  # the original stores its weights here
        return self.linear_out(merge_heads(out))  # type: ignore[no-any-return]


def _refuses(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None if hasattr(module, "pos_bias_u") else "simplified_attention_score"


PEERS = (
    Peer("ESPnetTransducer", "espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention",
         ESPnetTransducer, "espnet", {"202511": "8c5dbb051fc7adcb"}, refuses=_refuses),
)  # fmt: skip
