"""The audio encoder of Gemma 3n in transformers: relative positions without biases, scores capped
by tanh. Its blocks of queries do not change the result: each query sees the same numbers of frames
before and after itself, in any block."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels.integrations.attention import (
    attend,
    mask_bounds,
    narrower,
    project_table,
    split_heads,
    unhidden,
    within,
)
from txl_kernels.integrations.peer import Accelerated, Draw, Peer, Sample, width_of


class Gemma3n(Accelerated):
    skips = ("relative_position_embedding",)
    needs = ("per_dim_scale", "q_scale", "relative_position_embedding", "max_past_horizon", "max_future_horizon")

    @staticmethod
    def reach(module: Any) -> int:
        return 13 + int(max(module.max_past_horizon, module.max_future_horizon))

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample:
        padding = seen is not None and seen.all(1).any()  # it supports no other mask
        mask = torch.zeros(draw.B, draw.T, dtype=torch.bool, device="cpu")
        if seen is not None and padding:
            mask = ~seen[:, 0]
        return draw.frames(width_of(module.q_proj)), lambda m, x: m(x, mask).flatten(-2)

    def forward(self: Any, hidden_states: Tensor, mask: Tensor) -> Tensor:
        why = self.why_not_kernel(hidden_states)
        bounds = mask_bounds(mask, unhidden) if why is None else None
        if bounds is None:
            return self.fall_back(why or "a mask with holes", hidden_states, mask)  # type: ignore[no-any-return]
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * (self.q_scale * F.softplus(self.per_dim_scale)).to(q.dtype)
        window = narrower((self.max_past_horizon, self.max_future_horizon), self.setting("window"))
        positions = self.relative_position_embedding
        distances = torch.arange(self.max_past_horizon, -self.max_future_horizon - 1, -1, device=q.device)
        encodings, past = within(window, positions._get_timing_signal_1d_pos(distances, q.dtype), self.max_past_horizon)
        r = project_table(positions.pos_proj, encodings, heads)
        out = attend(
            q, k, v, r, None, None, bounds, past=past, window=window, scale=1.0,
            softcap=float(self.attention_logits_soft_cap),
        )  # fmt: skip
        return out.transpose(1, 2)


PEERS = (
    Peer("Gemma3nAudio", "transformers.models.gemma3n.modeling_gemma3n.Gemma3nAudioAttention", Gemma3n, "transformers",
         {"5.23.0": "cb301cf675570f72"}),
)  # fmt: skip
