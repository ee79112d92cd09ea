"""The audio encoders of Gemma 3n and Gemma 4 in transformers: relative positions without biases,
scores capped by tanh. Their blocks of queries do not change the result: each query sees the same
numbers of frames before and after itself, in any block."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.adapters.transformers import own_way
from txl_kernels.integrations.attention import (
    attend,
    blocked_bounds,
    bounds_or_reason,
    merge_heads,
    narrower,
    once,
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
        bounds = bounds_or_reason(why, mask, unhidden, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return self.fall_back(bounds, hidden_states, mask)  # type: ignore[no-any-return]
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


class Gemma4(Accelerated):
    """Row p of the table belongs to distance `max_past_horizon` - p. Distances beyond its last row,
    as after the query, have no term."""

    needs = ("per_dim_scale", "q_scale", "k_scale", "relative_k_proj", "max_past_horizon", "max_future_horizon")

    @staticmethod
    def reach(module: Any) -> int:
        return 13 + int(max(module.max_past_horizon, module.max_future_horizon))

    @staticmethod
    def sample(module: Any, draw: Draw, seen: Tensor | None) -> Sample:
        past, future, size = module.max_past_horizon, module.max_future_horizon, module.chunk_size
        at = torch.arange(draw.T, device="cpu")
        distance = at.unsqueeze(1) - at
        shown = ((distance <= past) & (distance >= -future)).expand(draw.B, -1, -1)
        if seen is not None:
            shown = shown & seen
        shown = F.pad(shown, (past, future + size, 0, -draw.T % size)).unflatten(1, (-1, size))
        context = torch.arange(module.context_size, device="cpu")
        blocks = torch.stack([shown[:, n, :, n * size + context] for n in range(shown.size(1))], 1)
        width = width_of(module.q_proj)
        table = draw.normal(module.context_size // 2 + 1, width)
        return draw.frames(width), lambda m, x: m(x, table, ~blocks.unsqueeze(1))[0]

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        past, length = self.max_past_horizon, hidden_states.size(1)
        why = own_way(self, {}) or self.why_not_kernel(hidden_states)
        if why is None and (attention_mask is None or attention_mask.dim() != 5):
            why = "no mask of blocks: a query sees all frames near its block"
        bounds = None
        if why is None and attention_mask is not None:
            mask = attention_mask
            bounds = once("mask", mask, (length, past), lambda: blocked_bounds(mask[:, 0] == 0, past, length))
        if bounds is None:
            return self.fall_back(why or "a mask with holes", hidden_states, position_embeddings, attention_mask)  # type: ignore[no-any-return]
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states).float(), heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * self.q_scale * F.softplus(self.per_dim_scale)
        window = narrower((past, self.max_future_horizon), self.setting("window"))
        r = project_table(self.relative_k_proj, position_embeddings, heads).to(q.dtype)
        out = attend(
            q, k * self.k_scale, v, r, None, None, bounds, past=past, outside="zero", window=window, scale=1.0,
            softcap=float(self.attention_logits_soft_cap),
        )  # fmt: skip
        return self.post(merge_heads(out).to(hidden_states.dtype)), None


def _why_not_4(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    it: Any = module
    if it.context_size // 2 < it.max_past_horizon:
        return "its table of positions ends before distance 0, at which a query sees itself"
    hidden = it.config.attention_invalid_logits_value
    return None if hidden < -1e4 else f"a mask that leaves hidden keys a score of {hidden:g}"


PEERS = (
    Peer("Gemma3nAudio", "transformers.models.gemma3n.modeling_gemma3n.Gemma3nAudioAttention", Gemma3n, "transformers",
         {"5.23.0": "cb301cf675570f72"}),
    Peer("Gemma4Audio", "transformers.models.gemma4.modeling_gemma4.Gemma4AudioAttention", Gemma4, "transformers",
         {"5.24.0": "bf5d5b92ff3a6187"}, why_not_module=_why_not_4),
)  # fmt: skip
