"""The text models of Inkling and Inkling 2 (Thinking Machines 2026) in transformers, and of Inkling
2's loop variant, which Inkling 2 Mini is.

Their attention has no rotary embedding. A projection of the hidden state, the position query,
multiplies a table of distances that all heads share; distances outside the table add nothing.
Keys and values are grouped. Inkling 2 adds a sink. Short convolutions, norms, gates and caches stay
the original's.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from txl_kernels.integrations.adapters.inkling_masks import (
    CachedKeys,
    CausalMask,
    distances_of,
    forward_with_intervals,
    keys_of,
    mask_of,
)
from txl_kernels.integrations.adapters.transformers import (
    implementation_of,
    interface_bounds,
    masks_of_interface,
    peer,
    why_not_interface,
)
from txl_kernels.integrations.attention import (
    ALL,
    Bounds,
    Window,
    attend,
    condition_met,
    intersect,
    memoized,
    merge_heads,
)
from txl_kernels.integrations.peer import Accelerated, RandomInputs, Sample, has_user_hooks

IMPLEMENTATIONS = (None, "eager", "sdpa")  # those whose masks are tensors


class TextModel(Accelerated):
    """A text model, or a model of several modalities that makes its text model's masks. It computes
    nothing itself: its layers get intervals in place of masks and distances of all pairs."""

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        """Prepare an accelerated class; register it with transformers' collector of hidden states,
        attention weights and router logits, which knows models by the names of their classes."""
        super().__init_subclass__(**kwargs)
        cls._forward_with_intervals = forward_with_intervals(cls.original)
        capturing: Any = sys.modules.get("transformers.utils.output_capturing")
        if capturing is not None:
            capturing._CAN_RECORD_REGISTRY[cls.__new__(cls)] = cls._can_record_outputs

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._needs_pair_masks(kwargs):  # a layer that falls back counts it
            return self.original.forward(self, *args, **kwargs)
        return self._forward_with_intervals(*args, **kwargs)

    def _needs_pair_masks(self: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an original layer may answer, or a hook on a layer may read its arguments, which
        needs masks and distances of all pairs."""
        text = getattr(self, "language_model", self)
        implementation = implementation_of(text)
        weight = text.norm.weight
        return (
            implementation not in IMPLEMENTATIONS
            or weight.device.type == "meta"  # until a call loads it
            or not all(isinstance(layer.self_attn, Accelerated) for layer in text.layers)
            or any(has_user_hooks(x, before=True) for layer in text.layers for x in (layer, layer.self_attn))
            or why_not_interface(self, kwargs) is not None
            or self.why_not_kernel(weight) is not None
        )


class Attention(Accelerated):
    """The common part of the attention layers of Inkling and of Inkling 2."""

    reads = ("past_key_values",)
    mask_forms = staticmethod(masks_of_interface)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        at = torch.arange(inputs.T, device="cpu")
        distance = at.unsqueeze(1) - at
        shown = (distance >= 0) & (distance < (module.sliding_window or inputs.T))
        shown = shown.expand(inputs.B, -1, -1) if seen is None else shown & seen
        given: dict[str, Any] = {"attention_mask": inputs.mask(shown)}
        names = inspect.signature(module.forward).parameters
        width = module.config.hidden_size
        if "relative_distance" in names:
            given |= {"relative_distance": distance, "position_ids": at.expand(inputs.B, -1)}
        others = [f"{name}_hidden_states" for name in ("key", "value") if f"{name}_hidden_states" in names]
        given |= {name: inputs.frames(width) for name in others if seen is not None or names[name].default is not None}
        return inputs.frames(width), lambda m, x: m(x, **given)

    def fall_back(self: Any, why: str, *args: Any, **kwargs: Any) -> Any:
        """Call the original with a mask and distances of all pairs."""
        given = self.named(args, kwargs)
        x = given["hidden_states"]
        if isinstance(given.get("attention_mask"), CausalMask):
            additive = self.config._attn_implementation != "sdpa"
            given["attention_mask"] = mask_of(
                given["attention_mask"], x.size(1), self.sliding_window, x, additive=additive
            )
        if isinstance(given.get("relative_distance"), CachedKeys):
            given["relative_distance"] = distances_of(given["relative_distance"], x.size(1), x.device)
        return super().fall_back(why, **given)

    def _bounds(self: Any, mask: Any, keys: CachedKeys | None, length: int, **kwargs: Any) -> tuple[Bounds, bool] | str:
        """Return the intervals of keys that queries see, and whether causality and the window hide
        keys of them; or the reason why the original must answer.

        kwargs: those of the call, of which the original reads `is_causal`.
        """
        if keys is None:
            return "a static cache in a compiled call"
        if not 0 <= keys.past <= keys.total - length:
            return "queries beyond the keys of their cache"
        if isinstance(mask, CausalMask):
            return (mask.start, mask.end), True
        implementation, window = implementation_of(self), self.sliding_window
        if mask is None:
            # SDPA's own mask is causal from the first key, and knows no window.
            known = implementation == "sdpa" and kwargs.get("is_causal", self.is_causal) and length > 1
            return (ALL, True) if known and keys.past == 0 and length <= (window or length) else "no mask"
        if implementation not in IMPLEMENTATIONS:
            return f"an attention implementation that masks otherwise, {implementation!r}"
        if implementation != "sdpa" and isinstance(mask, Tensor) and mask.dtype == torch.bool:
            return "a boolean mask, which eager attention adds to scores"
        bounds = interface_bounds(None, mask, keys.total)
        if isinstance(bounds, str):
            return bounds
        _, end = bounds
        last = keys.past + length
        message = "the mask shows unused room of the cache"
        if end is not None and keys.total > last and not condition_met((end <= last).all(), message):
            return message
        return bounds, False

    def _attend(
        self: Any, q: Tensor, p: Tensor, k: Tensor, v: Tensor, table: Tensor, keys: CachedKeys, bounds: Bounds, causal: bool,
        sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the attention, [B, L, H * D].

        p: position queries [B, H, L, d_rel]. k, v: all that the cache returns. table: [d_rel,
        extent]. sink: [B, H, L]. bounds, causal: the result of `_bounds`.
        """
        visible = keys.past + q.size(2)  # a static cache has unused room behind them
        if self.sliding_window == 1 and k.size(2) > keys.total:
            # transformers' cache of a window of one key keeps all: it slices the last 0.
            k, v = k[:, :, -keys.total :], v[:, :, -keys.total :]
        if k.size(2) != keys.total:
            raise ValueError(f"the cache must return the {keys.total} keys that it announced, got {k.size(2)}")
        start, end = (None if x is None else x.to(q.device) for x in bounds)
        r = table.t().unsqueeze(0).to(q.dtype)
        # Convolutions leave keys and values with their channels apart.
        q, p, k, v, r = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, p, k, v, r))
        out = attend(
            q, k[:, :, :visible], v[:, :, :visible], r, None, None, (start, end), q_pos=p, zero_row=0, outside="zero",
            window=self._window(causal), scale=self.scaling, position_scale=1.0, sink=sink, dropout_p=self._dropout(),
        )  # fmt: skip
        return merge_heads(out)

    def _window(self: Any, causal: bool) -> Window:
        """Return the numbers of keys before and after its own that a query sees; None for all."""
        window: Window = self.setting("window")
        if not causal:
            return window
        return intersect((None if self.sliding_window is None else self.sliding_window - 1, 0), window)

    def _dropout(self: Any) -> float:
        return float(self.attention_dropout) if self.training else 0.0


class Inkling(Attention):
    skips = ("rel_logits_proj",)
    needs = ("r_proj", "k_sconv", "v_sconv", "q_norm", "rel_logits_proj", "rel_extent", "num_key_value_groups")

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, conv_mask: Tensor | None = None, cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        new = "cache" in self.arguments  # since 5.24
        held = {"cache" if new else "past_key_values": cache}
        length, layer = hidden_states.size(1), self.layer_idx
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, self._dropout())
        keys = attention_mask.keys if isinstance(attention_mask, CausalMask) else None
        if why is None and keys is None:
            keys = keys_of(cache, layer, length)
        found = why or self._bounds(attention_mask, keys, length, **kwargs)
        if isinstance(found, str):
            return found
        offset = 0 if cache is None else cache.get_query_offset(layer)
        tau = self._tau(offset, length, hidden_states.device)  # before the cache counts the new keys
        k = self.k_sconv(self.k_proj(hidden_states), conv_mask=conv_mask, **held)
        v = self.v_sconv(self.v_proj(hidden_states), conv_mask=conv_mask, **held)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (self.q_proj(hidden_states), k, v))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        p = self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if tau is not None:
            q, p = ((x.float() * tau).to(x.dtype) for x in (q, p))
        if cache is not None:
            k, v = cache.update(k, v, layer, **({"kwargs": kwargs} if new else {}))
        return self.o_proj(self._attend(q, p, k, v, self.rel_logits_proj.proj, keys, *found)), None

    def _tau(self: Any, offset: Any, length: int, device: torch.device) -> Tensor | None:
        """Return the factor [L, 1] of queries and position queries, float32; None for 1.

        offset: the position of the first query, an int or an integer tensor [].
        """
        floor = self.config.log_scaling_n_floor
        if self.is_sliding or floor is None:
            return None
        count = (torch.arange(length, device=device) + offset + 1).float()
        tau: Tensor = 1.0 + self.config.log_scaling_alpha * (count / floor).clamp(min=1.0).log()
        return tau.unsqueeze(-1)


class Inkling2(Attention):
    """The attention layers of Inkling 2, whose projections include norms and convolutions."""

    skips = ("relative_position_bias",)
    needs = ("q_proj", "k_proj", "v_proj", "o_proj", "sink_proj", "relative_position_bias", "num_key_value_groups")

    def _forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, relative_distance: Any, cache: Any, **kwargs: Any
    ) -> tuple[Tensor, None] | str:
        """Answer a call, whose arguments beyond those of both kinds of layers are in kwargs."""
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        length = hidden_states.size(1)
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, self._dropout())
        keys = relative_distance if why is None else None
        if isinstance(keys, Tensor):
            keys = memoized("distances", relative_distance, "inkling", lambda: _keys_of(relative_distance))
            why = None if keys is not None else "distances of another order"
        found = why or self._bounds(attention_mask, keys, length, **kwargs)
        if isinstance(found, str):
            return found
        of_keys, of_values = (kwargs.pop(f"{name}_hidden_states", None) for name in ("key", "value"))
        position_ids = kwargs["position_ids"]
        q = self.q_proj(hidden_states, position_ids)
        k = self.k_proj(hidden_states if of_keys is None else of_keys, cache=cache, **kwargs)
        v = self.v_proj(hidden_states if of_values is None else of_values, cache=cache, **kwargs)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx + kwargs["cache_offset"], kwargs=kwargs)
        bias = self.relative_position_bias
        p = bias.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
        p = bias.norm(p, position_ids).transpose(1, 2)
        sink = self.sink_proj(hidden_states).transpose(1, 2)
        out = self._attend(q, p, k, v, bias.proj, keys, *found, sink=sink)
        return self.o_proj(out, hidden_states), None


class Sliding(Inkling2):
    """The sliding layers, whose keys and values have the queries' hidden states unless others are
    given."""

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, relative_distance: Any, conv_mask: Tensor | None = None,
        cache: Any = None, key_hidden_states: Tensor | None = None, value_hidden_states: Tensor | None = None,
        cache_offset: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        return self._forward(  # type: ignore[no-any-return]
            hidden_states, attention_mask, relative_distance, cache, conv_mask=conv_mask, cache_offset=cache_offset,
            key_hidden_states=key_hidden_states, value_hidden_states=value_hidden_states, **kwargs,
        )  # fmt: skip


class Full(Inkling2):
    """The full layers, whose arguments have another order."""

    def forward(
        self: Any, hidden_states: Tensor, key_hidden_states: Tensor, value_hidden_states: Tensor, attention_mask: Any,
        relative_distance: Any, conv_mask: Tensor | None = None, cache: Any = None, cache_offset: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        return self._forward(  # type: ignore[no-any-return]
            hidden_states, attention_mask, relative_distance, cache, conv_mask=conv_mask, cache_offset=cache_offset,
            key_hidden_states=key_hidden_states, value_hidden_states=value_hidden_states, **kwargs,
        )  # fmt: skip


def _keys_of(distances: Tensor) -> CachedKeys | None:
    """Return the keys of a cache from the distances [L, S] that an original text model passes; None
    if they are of another order."""
    if isinstance(distances, FakeTensor):
        return None
    keys = CachedKeys(int(distances[0, 0]), distances.size(1), 0)
    usual = distances_of(keys, distances.size(0), distances.device)
    return keys if condition_met((distances == usual).all(), "distances are of another order") else None


PEERS = (
    peer("Inkling", "inkling.InklingAttention", Inkling,
         {"5.15.1": "d268455d49756c28", "5.17.0": "16e78d3ad87d33c1", "5.22.2": "4bdbbd16ee6d5ce2",
          "5.24.0": "c3d63e2a612eb0e5"}),
    peer("InklingText", "inkling.InklingTextModel", TextModel,
         {"5.15.1": "0aa44009a140a0a1", "5.17.0": "dd2b28992f355fa7", "5.19.0": "96a458bc1aa97126",
          "5.22.2": "786301cadfd0507b", "5.23.0": "f919cd8c4020aeca", "5.24.0": "bab213df58729231"}),
    peer("InklingMultimodal", "inkling.InklingModel", TextModel, {"5.24.0": "e602f1f1a5e5d691"}),
    peer("Inkling2Sliding", "inkling2.Inkling2SlidingAttention", Sliding, {"5.24.0": "fb32c8af326d4744"}),
    peer("Inkling2Full", "inkling2.Inkling2FullAttention", Full, {"5.24.0": "e6d129edb2e4df41"}),
    peer("Inkling2Text", "inkling2.Inkling2TextModel", TextModel, {"5.24.0": "970b5014ff5c8e6f"}),
    peer("Inkling2LoopSliding", "inkling2_loop.Inkling2LoopSlidingAttention", Sliding, {"5.24.0": "fb32c8af326d4744"}),
    peer("Inkling2LoopFull", "inkling2_loop.Inkling2LoopFullAttention", Full, {"5.24.0": "e6d129edb2e4df41"}),
    peer("Inkling2LoopText", "inkling2_loop.Inkling2LoopTextModel", TextModel, {"5.24.0": "26379b9bbf21587e"}),
)  # fmt: skip
