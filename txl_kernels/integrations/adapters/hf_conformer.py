"""transformers: Wav2Vec2-Conformer, Wav2Vec2-BERT, SeamlessM4T v1 and v2.

"relative" is the paper's attention. "relative_key" is Shaw's: one table for all heads, clamped, no
biases; row left + (j - i) of `distance_embedding` holds key j for query i.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.adapters.transformers import DISTRIBUTION, MODELS, bounds_or_reason, own_way
from txl_kernels.integrations.attention import attend, merge_heads, project_table, split_heads
from txl_kernels.integrations.peer import Peer


class HFConformer(Accelerated):
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        relative_position_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        given = dict(kwargs)
        if relative_position_embeddings is not None:
            given["relative_position_embeddings"] = relative_position_embeddings
        dropout_p = float(self.dropout.p) if self.training else 0.0
        why = own_way(self, kwargs) or self.hindrance(hidden_states, dropout_p)
        bounds = bounds_or_reason(attention_mask) if why is None else why
        if isinstance(bounds, str):
            return self.fall_back(bounds, hidden_states, attention_mask, **given)  # type: ignore[no-any-return]
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.linear_q, self.linear_k, self.linear_v))
        settings = {"scale": self.head_size**-0.5, "dropout_p": dropout_p}
        if self.position_embeddings_type == "relative_key":
            r = self.distance_embedding.weight.to(q.dtype).unsqueeze(0)
            zero_row = self.left_max_position_embeddings
            out = attend(q, k, v, r, None, None, bounds, zero_row=zero_row, r_descending=True, clamp=True, **settings)
        else:
            if relative_position_embeddings is None:
                raise ValueError(
                    "relative_position_embeddings must be given where position_embeddings_type is 'relative'"
                )
            r = project_table(self.linear_pos, relative_position_embeddings, heads)
            out = attend(q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, zero_row=q.size(2) - 1, **settings)
        return self.linear_out(merge_heads(out)), None


def _refuses(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    kind = module.position_embeddings_type
    return None if kind in ("relative", "relative_key") else f"position_embeddings_type is {kind!r}"


PEERS = (
    Peer("Wav2Vec2Conformer", f"{MODELS}.wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention",
         HFConformer, DISTRIBUTION, {"5.23.0": "1faca184490a5beb"}, refuses=_refuses),
    Peer("Wav2Vec2Bert", f"{MODELS}.wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention",
         HFConformer, DISTRIBUTION, {"5.23.0": "2b5400e530c09c95"}, refuses=_refuses),
    Peer("SeamlessM4T", f"{MODELS}.seamless_m4t.modeling_seamless_m4t.SeamlessM4TConformerSelfAttention",
         HFConformer, DISTRIBUTION, {"5.23.0": "72fe5de633ceeab2"}, refuses=_refuses),
    Peer("SeamlessM4Tv2", f"{MODELS}.seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
         HFConformer, DISTRIBUTION, {"5.23.0": "178f996e199a2445"}, refuses=_refuses),
)  # fmt: skip
