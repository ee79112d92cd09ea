"""The audio encoders of Gemma 3n and Gemma 4 in transformers: relative positions without biases,
scores capped by tanh. Their blocks of queries do not change the result: each query sees the same
numbers of frames before and after itself, in any block."""

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.adapters.transformers import peer, why_not_interface
from txl_kernels.integrations.attention import (
    attend,
    blocked_bounds,
    bounds_or_reason,
    crop,
    intersect,
    is_zero,
    memoized,
    merge_heads,
    project_table,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, RandomInputs, Sample, additive, width_of


class Gemma(Accelerated):
    """The common part of both."""

    @staticmethod
    def sample_length(module: Any, least: int) -> int:
        return least + int(max(module.max_past_horizon, module.max_future_horizon))

    def attend_capped(self: Any, q: Tensor, k: Tensor, v: Tensor, r: Tensor, *bounds: Any, **settings: Any) -> Tensor:
        """Return the attention [B, H, L, D] with capped scores, within the module's own context."""
        window = intersect((self.max_past_horizon, self.max_future_horizon), self.setting("window"))
        softcap = float(self.attention_logits_soft_cap)
        return attend(q, k, v, r, None, None, *bounds, window=window, scale=1.0, softcap=softcap, **settings)


class Gemma3n(Gemma):
    skips = ("relative_position_embedding",)
    needs = ("per_dim_scale", "q_scale", "relative_position_embedding", "max_past_horizon", "max_future_horizon")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        mask = inputs.padding(seen)  # it supports no other mask
        return inputs.frames(width_of(module.q_proj)), lambda m, x: m(x, mask)

    def forward(self: Any, hidden_states: Tensor, mask: Tensor) -> Tensor | str:
        why = self.why_not_kernel(hidden_states)
        bounds = bounds_or_reason(why, mask, is_zero, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * (self.q_scale * F.softplus(self.per_dim_scale)).to(q.dtype)
        window = intersect((self.max_past_horizon, self.max_future_horizon), self.setting("window"))
        positions = self.relative_position_embedding
        distances = torch.arange(self.max_past_horizon, -self.max_future_horizon - 1, -1, device=q.device)
        encodings, past = crop(window, positions._get_timing_signal_1d_pos(distances, q.dtype), self.max_past_horizon)
        r = project_table(positions.pos_proj, encodings, heads)
        return self.attend_capped(q, k, v, r, bounds, past=past).transpose(1, 2)  # type: ignore[no-any-return]


class Gemma4(Gemma):
    """Row p of the table belongs to distance `max_past_horizon` - p. Distances beyond its last row,
    as after the query, have no term."""

    needs = ("per_dim_scale", "q_scale", "k_scale", "relative_k_proj", "max_past_horizon", "max_future_horizon")
    hides: ClassVar[bool] = True  # whether a mask is True, or not zero, for hidden keys: since 5.20

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.hides = "logical_not" not in inspect.unwrap(cls.original.forward).__code__.co_names

    def _seen(self: Any, mask: Tensor) -> Tensor:
        """Return where queries see keys, bool, of a mask [B, 1, ..]."""
        return mask[:, 0] == 0 if self.hides else mask[:, 0] != 0

    @staticmethod
    def mask_forms(module: Any) -> tuple[str, ...]:
        return ("bool", "additive")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        past, future, size = module.max_past_horizon, module.max_future_horizon, module.chunk_size
        at = torch.arange(inputs.T, device="cpu")
        distance = at.unsqueeze(1) - at
        shown = ((distance <= past) & (distance >= -future)).expand(inputs.B, -1, -1)
        if seen is not None:
            shown = shown & seen
        shown = F.pad(shown, (past, future + size, 0, -inputs.T % size)).unflatten(1, (-1, size))
        context = torch.arange(module.context_size, device="cpu")
        blocks = torch.stack([shown[:, n, :, n * size + context] for n in range(shown.size(1))], 1)
        mask = (additive(blocks) if inputs.form == "additive" else ~blocks).unsqueeze(1)
        width = width_of(module.q_proj)
        table = inputs.normal(1, module.context_size // 2 + 1, width)
        return inputs.frames(width), lambda m, x: m(x, table, mask)

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Any = None
    ) -> tuple[Tensor, None] | str:
        past, length, mask = self.max_past_horizon, hidden_states.size(1), attention_mask
        why = why_not_interface(self, {}) or self.why_not_kernel(hidden_states)
        if why is None and (mask is None or mask.dim() != 5):
            why = "no mask of blocks: a query sees all frames near its block"
        bounds = why or memoized("mask", mask, (length, past), lambda: blocked_bounds(self._seen(mask), past, length))
        if bounds is None or isinstance(bounds, str):
            return bounds or "a mask with holes"
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states).float(), heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        q = q * self.q_scale * F.softplus(self.per_dim_scale)
        r = project_table(self.relative_k_proj, position_embeddings, heads).to(q.dtype)
        out = self.attend_capped(q, k * self.k_scale, v, r, bounds, past=past, outside="zero")
        return self.post(merge_heads(out).to(hidden_states.dtype)), None


def _why_not_4(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    it: Any = module
    if it.context_size // 2 < it.max_past_horizon:
        return "its table of positions ends before distance 0, at which a query sees itself"
    hidden = it.config.attention_invalid_logits_value
    return None if hidden < -1e4 else f"a mask that leaves hidden keys a score of {hidden:g}"


PEERS = (
    peer("Gemma3nAudio", "gemma3n.Gemma3nAudioAttention", Gemma3n,
         {"4.53.3": "b33f7b948cdd1e2a", "5.0.0": "302dc990265aea62", "5.15.1": "cb301cf675570f72"}),
    peer("Gemma4Audio", "gemma4.Gemma4AudioAttention", Gemma4,
         {"5.5.4": "cda99ae4abca0b79", "5.13.1": "477ddccabe048a70", "5.15.1": "4143f123462945fe",
          "5.20.2": "bf5d5b92ff3a6187"},
         why_not_module=_why_not_4),
)  # fmt: skip
