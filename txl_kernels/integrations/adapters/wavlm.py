"""WavLM's attention in transformers, and BEATs' in ESPnet and SpeechBrain (Chen et al. 2022): a
relative bias from a table of buckets, times a gate that each query computes.

A gate is a position query of width 1, whose table is the bias: r [H, T, 1]. The layers share the
biases of the first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.adapters.shared_bias import SharesBias, all_pairs, farthest_first
from txl_kernels.integrations.adapters.transformers import is_one, peer, why_not_interface
from txl_kernels.integrations.attention import (
    Bounds,
    attend,
    bounds_or_reason,
    dropout_of,
    is_zero,
    merge_heads,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class Gated(SharesBias):
    """The common part of WavLM's and BEATs' attention."""

    def attend_gated(
        self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor, bounds: Bounds, dropout_p: float
    ) -> Tensor:
        """Return the attention [B, H, L, D] with biases [H, 2 L - 1] times gates [B, H, L, 1]."""
        return attend(
            q, k, v, bias.unsqueeze(-1).to(q.dtype), None, None, bounds, q_pos=gate.to(q.dtype), scale=self.scaling,
            position_scale=1.0, dropout_p=dropout_p, window=self.setting("window"),
        )  # fmt: skip


class WavLM(Gated):
    """The original passes its projections' weights to a function of torch, so that hooks and LoRA
    on them have no effect. Here, too, they are read and not called."""

    blocks, inner = "layers", "attention"
    reads = ("output_attentions",)
    needs = ("gru_rel_pos_const", "gru_rel_pos_linear", "num_buckets", "max_distance", "q_proj", "out_proj")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        mask, own = None if seen is None else ~inputs.padding(seen), None
        if not hasattr(module, "rel_attn_embed"):
            own = inputs.normal(module.num_heads, 2 * inputs.T - 1)

        def call(m: Any, x: Tensor) -> tuple[Any, ...]:
            shared = isinstance(m, Accelerated)
            bias = own if shared or own is None else _for_each_row(own, inputs.B, inputs.T)
            out, weights, made = m(x, attention_mask=mask, position_bias=bias, index=0 if seen is None else inputs.T)
            return out, weights, _for_each_row(made, inputs.B, inputs.T) if shared else made

        return inputs.frames(width_of(module.q_proj)), call

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None,
        index: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | str:  # fmt: skip
        dropout_p = float(self.dropout) if self.training else 0.0
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        why = why or self.why_no_bias(position_bias, hasattr(self, "rel_attn_embed"))
        bounds = bounds_or_reason(why, attention_mask, is_one, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        if position_bias is None:
            position_bias = _biases(self, self.rel_attn_embed, hidden_states.size(1), hidden_states)
        heads = self.num_heads
        q, k, v = (
            split_heads(F.linear(hidden_states, f.weight, f.bias), heads)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        gate = _gate(self.gru_rel_pos_linear(split_heads(hidden_states, heads)), self.gru_rel_pos_const)
        out = self.attend_gated(q, k, v, position_bias, gate, bounds, dropout_p)
        return F.linear(merge_heads(out), self.out_proj.weight, self.out_proj.bias), None, position_bias

    def expanded(self: Any, bias: Tensor, given: dict[str, Any]) -> Tensor:
        batch, length = given["hidden_states"].shape[:2]
        return _for_each_row(bias, batch, length)


class BEATs(Gated):
    """BEATs' attention: WavLM's, with gates of the projected queries; projections are called."""

    blocks, inner = "layers", "self_attn"
    skips = ("dropout_module",)
    needs = ("gru_rel_pos", "has_relative_attention_bias", "dropout_module", "bias_k", "add_zero_attn", "q_head_dim")

    def forward(
        self: Any, query: Tensor, key: Tensor | None, value: Tensor | None, key_padding_mask: Tensor | None = None,
        incremental_state: Any = None, need_weights: bool = True, static_kv: bool = False,
        attn_mask: Tensor | None = None, before_softmax: bool = False, need_head_weights: bool = False,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | str:  # fmt: skip
        dropout_p = dropout_of(self.dropout_module)
        why = self.why_not_kernel(query, dropout_p)
        if before_softmax or ((need_weights or need_head_weights) and self.setting("weights") == "fallback"):
            why = "attention weights asked for"
        elif incremental_state is not None or attn_mask is not None:
            why = "a cache, or an additive mask"
        why = why or self.why_no_bias(position_bias, self.has_relative_attention_bias)
        hidden = key_padding_mask
        bounds = bounds_or_reason(why, hidden, is_zero, keys=query.size(0))
        if isinstance(bounds, str):
            return bounds
        if position_bias is None:
            position_bias = _biases(self, self.relative_attention_bias, query.size(0), query)
        q, k, v = (  # from [L, B, H * D]
            f(query).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        gate = _gate(self.grep_linear(q), self.grep_a)
        out = self.attend_gated(q, k, v, position_bias, gate, bounds, dropout_p)
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None, position_bias

    def expanded(self: Any, bias: Tensor, given: dict[str, Any]) -> Tensor:
        length, batch = given["query"].shape[:2]
        return _for_each_row(bias, batch, length)


def _gate(projected: Tensor, factor: Tensor) -> Tensor:
    """Return the gates [B, H, L, 1] of projections [B, H, L, 8] and a factor [1, H, 1, 1]."""
    a, b = torch.sigmoid(projected.unflatten(-1, (2, 4)).sum(-1)).chunk(2, -1)
    return a * (b * factor - 1.0) + 2.0


def _biases(module: Any, table: nn.Module, length: int, x: Tensor) -> Tensor:
    """Return biases [H, 2 L - 1], farthest future first, on x's device."""
    biases: Tensor = table(module._relative_positions_bucket(farthest_first(length, x.device)))  # [T, H]
    return biases.t()


def _for_each_row(bias: Tensor, batch: int, length: int) -> Tensor:
    """Expand biases [H, T] to [B * H, L, L], as the originals expect them."""
    return all_pairs(bias, length).repeat(batch, 1, 1)


def _why_not_beats(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    if not module.self_attention or module.bias_k is not None or module.add_zero_attn:
        return "no plain self-attention: it has other keys, or keys of its own"
    if not module.gru_rel_pos:
        return "its biases have no gate"
    return BEATs.why_not_alone(module, ancestors)


def _without_positions(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None if module.has_relative_attention_bias else "no relative positions"


PEERS = (
    peer("WavLM", "wavlm.WavLMAttention", WavLM,
         {"4.36.2": "b99e849db2c10b68", "5.17.0": "c61fadef4c77fff3", "5.19.0": "d8618ff0f5a9a61c"},
         why_not_module=WavLM.why_not_alone),
    Peer("ESPnetBEATs", "espnet2.asr.encoder.beats_encoder.MultiheadAttention", BEATs, "espnet",
         {"202511": "68e6f07fda44b9b0"}, why_not_module=_why_not_beats, why_nothing_to_do=_without_positions),
    Peer("SpeechBrainBEATs", "speechbrain.lobes.models.beats.MultiheadAttention", BEATs, "speechbrain",
         {"1.1.2": "66af835bbc66ca7c"}, why_not_module=_why_not_beats, why_nothing_to_do=_without_positions),
)  # fmt: skip
