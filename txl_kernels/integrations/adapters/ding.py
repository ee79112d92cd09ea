"""DI-engine: AttentionXL of its GTrXL, hidden states before the segment, [L, B, d]."""

from typing import Any

from torch import Tensor, nn

from txl_kernels.integrations.accelerated import Accelerated
from txl_kernels.integrations.attention import attend, dropout_of, mask_bounds
from txl_kernels.integrations.peer import Peer


class DIEngine(Accelerated):
    def forward(
        self: Any,
        inputs: Tensor,
        pos_embedding: Tensor,
        full_input: Tensor,
        u: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        given = (inputs, pos_embedding, full_input, u, v, mask)
        why = self.hindrance(inputs)
        if mask is None:
            why = "no mask: keys ahead then meet the next query's shifted scores"
        bounds = mask_bounds(mask, _visible) if why is None else None
        if bounds is None:
            return self.fall_back(why or "a mask with holes", *given)  # type: ignore[no-any-return]
        heads, width = self.head_num, self.head_dim
        keys, values = self.attention_kv(full_input).chunk(2, -1)
        q, k, x = (
            y.unflatten(-1, (heads, width)).permute(1, 2, 0, 3) for y in (self.attention_q(inputs), keys, values)
        )
        r = self.project_pos(pos_embedding.flip(0)).squeeze(1).unflatten(-1, (heads, width)).transpose(0, 1)
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) else 0.0
        # Causal besides the mask: the table has no distance below 0.
        out = attend(q, k, x, r, u, v, bounds, causal=True, scale=self.scale, dropout_p=dropout_of(self, p))
        return self.dropout(self.project(out.permute(2, 0, 1, 3).flatten(-2)))  # type: ignore[no-any-return]


def _visible(mask: Tensor) -> Tensor:
    """[L, S, 1 or B], True: hidden -> [1 or B, L, S]."""
    return ~mask.bool().permute(2, 0, 1)


PEERS = (
    Peer("DIEngineAttentionXL", "ding.torch_utils.network.gtrxl.AttentionXL", DIEngine, "DI-engine",
         {"0.5.3": "26e853cdeee3eb66"}),
)  # fmt: skip
