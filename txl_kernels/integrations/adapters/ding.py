"""The AttentionXL of DI-engine's GTrXL, with hidden states before the segment, [L, B, d]."""

from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.attention import (
    OTHER_KEYS,
    Bounds,
    attend,
    bounds_of,
    condition_met,
    dropout_of,
    memoized,
    why_not_read,
)
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class DIEngine(Accelerated):
    skips = ("dropout",)
    needs = ("attention_kv", "attention_q", "project_pos", "head_num")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        width, heads, held = width_of(module.attention_q), module.head_num, 0 if seen is None else 5
        memory, table = inputs.normal(held, inputs.B, width), inputs.normal(held + inputs.T, 1, width)
        u, v = inputs.normal(heads, module.head_dim), inputs.normal(heads, module.head_dim)
        shown = torch.ones(inputs.T, inputs.T, dtype=torch.bool, device="cpu").tril()
        shown = shown.expand(inputs.B, -1, -1) if seen is None else shown & seen
        mask = nn.functional.pad(~shown, (held, 0)).permute(1, 2, 0)

        def call(m: Any, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            out: Tensor = m(x, table, torch.cat([memory, x]), u, v, mask)
            return out.transpose(0, 1)

        return inputs.frames(width), call

    def forward(
        self: Any, inputs: Tensor, pos_embedding: Tensor, full_input: Tensor, u: Tensor, v: Tensor, mask: Any = None
    ) -> Tensor | str:
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(inputs, dropout_p)
        if mask is None:
            why = "no mask: keys ahead then meet the next query's shifted scores"
        elif mask.size(1) != full_input.size(0):
            why = OTHER_KEYS
        why = why or why_not_read(mask)
        bounds = why or memoized("mask", mask, "causal", lambda: _bounds(mask))
        if bounds is None or isinstance(bounds, str):
            return bounds or "a mask with holes, or that shows keys ahead"
        heads, width = self.head_num, self.head_dim
        keys, values = self.attention_kv(full_input).chunk(2, -1)
        q, k, x = (
            y.unflatten(-1, (heads, width)).permute(1, 2, 0, 3) for y in (self.attention_q(inputs), keys, values)
        )
        r = self.project_pos(pos_embedding.flip(0)).squeeze(1).unflatten(-1, (heads, width)).transpose(0, 1)
        out = attend(q, k, x, r, u, v, bounds, zero_row=0, causal=True, window=self.setting("window"),
                     scale=self.scale, dropout_p=dropout_p)  # fmt: skip
        return self.dropout(self.project(out.permute(2, 0, 1, 3).flatten(-2)))  # type: ignore[no-any-return]


def _bounds(mask: Tensor) -> Bounds | None:
    """Return the bounds of a mask [L, S, 1 or B], True where hidden; None if it has holes, or
    leaves keys after a query visible, for which the table has no rows."""
    bounds = bounds_of(~mask.bool().permute(2, 0, 1))
    if bounds is None or bounds[1] is None:
        return None
    length, keys = mask.shape[:2]
    within = (bounds[1] <= torch.arange(keys - length + 1, keys + 1, device=mask.device)).all()
    message = "the mask shows keys ahead, whose scores the original shifts from another query"
    return bounds if condition_met(within, message) else None


PEERS = (
    Peer("DIEngineAttentionXL", "ding.torch_utils.network.gtrxl.AttentionXL", DIEngine, "DI-engine",
         {"0.5.3": "5a63f91f291935d4"}),
)  # fmt: skip
