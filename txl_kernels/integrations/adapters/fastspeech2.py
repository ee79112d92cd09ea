"""transformers: FastSpeech2-Conformer."""

from typing import Any

from torch import Tensor

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.adapters.transformers import DISTRIBUTION, MODELS
from txl_kernels.integrations.attention import (
    attend,
    dropout_of,
    mask_bounds,
    merge_heads,
    nonzero,
    project_table,
    split_heads,
)
from txl_kernels.integrations.peer import Peer


class FastSpeech2(Accelerated):
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, None]:
        dropout_p = dropout_of(self.dropout)
        why = self.hindrance(hidden_states, dropout_p)
        if output_attentions and self.setting("weights") == "fallback":
            why = "attention weights asked for"
        bounds = mask_bounds(attention_mask, nonzero) if why is None else None
        if bounds is None or pos_emb is None:
            why = why or "a mask with holes"
            return self.fall_back(why, hidden_states, attention_mask, pos_emb, output_attentions)  # type: ignore[no-any-return]
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.linear_q, self.linear_k, self.linear_v))
        r = project_table(self.linear_pos, pos_emb, heads)
        out = attend(
            q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, zero_row=q.size(2) - 1,
            dropout_p=dropout_p,
        )  # fmt: skip
        return self.linear_out(merge_heads(out)), None


MODULE = f"{MODELS}.fastspeech2_conformer.modeling_fastspeech2_conformer"
PEERS = (
    Peer("FastSpeech2Conformer", f"{MODULE}.FastSpeech2ConformerAttention", FastSpeech2, DISTRIBUTION,
         {"5.23.0": "f1a5f3baae50146f"}),
)  # fmt: skip
