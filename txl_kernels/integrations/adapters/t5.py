"""The self-attention of T5 and its copies in transformers, of encoders and decoders (Raffel et al.
2020): a relative bias for each head from a table of buckets, and no scale.

T5's layers share the biases of the first; UMT5's layers have a table each. LongT5's local
attention sees as many keys before as after a query, in blocks whose size changes nothing.
"""

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from txl_kernels.integrations.adapters.shared_bias import SharesBias, all_pairs
from txl_kernels.integrations.adapters.transformers import (
    attentions_wanted,
    check_keys,
    implementation_of,
    interface_bounds,
    masks_of_interface,
    peer,
    why_not_interface,
)
from txl_kernels.integrations.attention import (
    Bounds,
    attend,
    blocked_bounds,
    condition_met,
    intersect,
    memoized,
    merge_heads,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, RandomInputs, Sample, additive, width_of
from txl_kernels.positions import t5_bucket_numbers


class Buckets(Accelerated):
    """The base class of the adapters of T5 and UMT5."""

    needs = ("q", "k", "v", "o", "key_value_proj_dim", "has_relative_attention_bias", "relative_attention_max_distance")
    # cache_position until 5.2, past_key_value until 4.55
    reads = ("past_key_values", "past_key_value", "output_attentions", "use_cache", "cache_position")
    projections: ClassVar[tuple[str, ...]] = ("q", "k", "v", "o")

    mask_forms = staticmethod(masks_of_interface)

    def why_original(self: Any, x: Tensor, others: Tensor | None, mask: Any, kwargs: dict[str, Any]) -> str | None:
        """Return the reason why the original must answer a call, whatever its biases and its mask
        are, or None."""
        why = why_not_interface(self, kwargs) or self.why_not_kernel(x, self.dropout_now())
        at = kwargs.get("cache_position")
        if why is None and others is not None:
            why = "cross-attention"
        elif why is None and getattr(self, "pruned_heads", None):
            why = "pruned heads"
        elif why is None and at is not None and not memoized("positions", at, "t5", lambda: _in_a_row(at)):
            why = "positions that do not follow one another"
        if why is None and self.implementation() not in ("eager", "sdpa"):
            why = f"an attention implementation that masks otherwise, {self.implementation()!r}"
        if why is None and isinstance(mask, Tensor) and mask.dtype == torch.bool and self.implementation() == "eager":
            why = "a bool mask, which eager attention adds to scores"
        return why

    def implementation(self: Any) -> str:
        return implementation_of(self) or "eager"

    def dropout_now(self: Any) -> float:
        return float(self.dropout) if self.training else 0.0

    def bounds_of_keys(self: Any, bounds: Bounds, mask: Tensor | None, keys: int) -> Bounds:
        """Return the bounds of a mask, for the number of keys that the cache returned."""
        check_keys(mask, keys)
        return bounds

    def answer(
        self: Any, x: Tensor, bounds: Bounds, mask: Tensor | None, bias: Tensor | None, cache: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the module's output and the biases [H, T]: those given, or of its own table.

        mask: the mask of `bounds`; without one transformers' sdpa is causal in a decoder.
        """
        length = x.size(1)
        *inputs, output = (getattr(self, name) for name in self.projections)
        q, k, v = (split_heads(f(x), width=self.key_value_proj_dim) for f in inputs)
        seen: Any = 0
        positions = kwargs.get("cache_position")
        if cache is not None:
            seen = cache.get_seq_length(self.layer_idx)
            seen = seen.clone() if isinstance(seen, Tensor) else seen  # a static cache counts in place
            more = () if positions is None else ({"cache_position": positions},)
            k, v = getattr(cache, "self_attention_cache", cache).update(k, v, self.layer_idx, *more)
        if positions is not None:
            seen = positions[0]
        bounds = self.bounds_of_keys(bounds, mask, k.size(2))
        causal = (
            mask is None
            and length > 1
            and self.implementation() == "sdpa"
            and bool(kwargs.get("is_causal", self.is_causal))
        )
        window = self.setting("window")
        if causal or (window is not None and cache is not None):  # a static cache has unused room behind the keys
            keys = length if causal else int(seen) + length
            k, v = k[:, :, :keys], v[:, :, :keys]
        if bias is None:
            # The last key is at the last query, also of a static cache, which has unused room
            # behind the keys.
            distances = torch.arange(1 - length, k.size(2), device=q.device) + (seen - (k.size(2) - length))
            bias = _biases(self, distances)
        out = attend(
            q, k, v, None, None, None, bounds, r_bias=bias.to(q.dtype), zero_row=length - 1, scale=1.0,
            causal=causal, window=window, dropout_p=self.dropout_now(),
        )  # fmt: skip
        return output(merge_heads(out)), bias


class T5(SharesBias, Buckets):
    """T5's attention, and that of its copies.

    Attributes:
        returns_cache: whether the original returns its cache before its biases, until 4.53.
    """

    blocks, inner = "block", "layer.0.SelfAttention"
    returns_cache: ClassVar[bool] = False

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "original" in vars(cls):  # an accelerated class, not an adapter
            cls.returns_cache = _returns_cache(cls.original)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample | None:
        if type(module).__name__.startswith("Switch"):
            # Layers of releases 5.0 to 5.13 drop the biases of the first, and record them as
            # weights, which an attention's own results do not show.
            return None
        mask, own = inputs.mask(seen), None
        if not module.has_relative_attention_bias:
            own = inputs.normal(module.n_heads, 2 * inputs.T - 1)

        def call(m: Any, x: Tensor) -> tuple[Any, ...]:
            bias = own
            if own is not None and not isinstance(m, Accelerated):
                bias = all_pairs(own, inputs.T).unsqueeze(0)
                if seen is not None:  # which the first layer of some releases adds
                    bias = bias + additive(seen.unsqueeze(1))
            result = list(m(x, mask=mask, position_bias=bias))
            at = 2 if _returns_cache(type(module)) else 1
            made = all_pairs(result[at], inputs.T).unsqueeze(0) if isinstance(m, Accelerated) else result[at]
            result[at] = made if seen is None else made.masked_fill(~seen.unsqueeze(1), 0)
            return tuple(result)

        return inputs.frames(width_of(module.q)), call

    def forward(
        self: Any, hidden_states: Tensor, mask: Tensor | None = None, key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None, past_key_values: Any = None, cache: Any = None, **kwargs: Any,
    ) -> tuple[Tensor | None, ...] | str:  # fmt: skip
        why = self.why_original(hidden_states, key_value_states, mask, kwargs)
        why = why or self.why_no_bias(position_bias, self.has_relative_attention_bias)
        held = _first(past_key_values, cache, kwargs.get("past_key_value"))
        if (
            self.returns_cache
            and "cache_position" not in self.arguments
            and (held is not None or kwargs.get("use_cache"))
        ):
            why = why or "a cache that is a tuple, in releases before 4.46"
        bounds = interface_bounds(why, mask, hidden_states.size(1) if held is None else None)
        if isinstance(bounds, str):
            return bounds
        out, bias = self.answer(hidden_states, bounds, mask, position_bias, held, kwargs)
        if self.returns_cache:
            return out, held, bias
        return (out, bias) if self.adds_mask() else (out, bias, None)

    def adds_mask(self: Any) -> bool:
        """Whether the original is of a release before 5.15: the first layer adds the mask to the
        biases that it passes on, and layers return no weights that were not asked for."""
        return "output_attentions" in self.arguments

    def expanded(self: Any, bias: Tensor, given: dict[str, Any]) -> Tensor:
        pairs = all_pairs(bias, given["hidden_states"].size(1)).unsqueeze(0)
        mask = given.get("mask")
        return pairs if mask is None or not self.adds_mask() else pairs + mask[..., : pairs.size(-1)]


def _returns_cache(original: Any) -> bool:
    code = inspect.unwrap(original.forward).__code__
    return "past_key_value" in code.co_varnames and "EncoderDecoderCache" not in code.co_names


class Pix2Struct(T5):
    """Pix2Struct's decoder: T5's attention under other names. A mask may have columns to spare."""

    blocks, inner = "layer", "self_attention.attention"
    needs = ("query", "key", "value", "output", "key_value_proj_dim", "has_relative_attention_bias", "is_causal")
    is_decoder = True
    projections = ("query", "key", "value", "output")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample | None:
        return None

    def bounds_of_keys(self: Any, bounds: Bounds, mask: Tensor | None, keys: int) -> Bounds:
        if mask is not None and mask.size(-1) < keys:
            check_keys(mask, keys)
        start, end = (None if x is None else x.clamp(max=keys) for x in bounds)
        return start, end


class UMT5(Buckets):
    """UMT5's attention. There is no trial: models of releases 5.5 to 5.13 read weights that its
    layers do not ask for, which an attention's own results do not show."""

    def forward(
        self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, cache: Any = None,
        attention_mask: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None] | str:  # fmt: skip
        held = _first(cache, kwargs.get("past_key_values"), kwargs.get("past_key_value"))
        why = self.why_original(hidden_states, encoder_hidden_states, attention_mask, kwargs)
        if why is None and not self.has_relative_attention_bias:
            why = "no table of biases"
        bounds = interface_bounds(why, attention_mask, hidden_states.size(1) if held is None else None)
        if isinstance(bounds, str):
            return bounds
        return self.answer(hidden_states, bounds, attention_mask, None, held, kwargs)[0], None


class LongT5Local(SharesBias):
    """A query sees the `local_radius` keys before and after its own. The original's first layer
    adds the mask [B, 1, blocks, block, 3 blocks] to the biases that it passes on."""

    blocks, inner = "block", "layer.0.LocalSelfAttention"
    needs = ("q", "k", "v", "o", "key_value_proj_dim", "local_radius", "block_len", "relative_attention_max_distance")
    returns_cache: ClassVar[bool] = False  # None, before the biases, until 4.53

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.returns_cache = "present_key_value_state" in inspect.unwrap(cls.original.forward).__code__.co_varnames

    def forward(
        self: Any, hidden_states: Tensor, mask: Any = None, position_bias: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Any, ...] | str:  # fmt: skip
        dropout_p = float(self.dropout) if self.training else 0.0
        length, radius = hidden_states.size(1), self.local_radius
        why = self.why_not_kernel(hidden_states, dropout_p)
        if attentions_wanted(self, {"output_attentions": output_attentions}):  # the caller unpacks them
            why = "attention weights asked for"
        elif getattr(self, "pruned_heads", None):
            why = "pruned heads"
        why = why or self.why_no_bias(position_bias, self.has_relative_attention_bias)
        if why is None and (mask is None or mask.dim() != 5):
            why = "no mask of blocks: a query sees all of three blocks"
        bounds = why or memoized(
            "mask", mask, (length, radius), lambda: blocked_bounds(mask[:, 0] > 0, self.block_len, length)
        )
        if bounds is None or isinstance(bounds, str):
            return bounds or "a mask with holes"
        q, k, v = (split_heads(f(hidden_states), width=self.key_value_proj_dim) for f in (self.q, self.k, self.v))
        if position_bias is None:
            position_bias = _biases(self, torch.arange(-radius, radius + 1, device=q.device))
        out = attend(
            q, k, v, None, None, None, bounds, r_bias=position_bias.to(q.dtype), zero_row=radius, scale=1.0,
            window=intersect((radius, radius), self.setting("window")), dropout_p=dropout_p,
        )  # fmt: skip
        none = (None,) if self.returns_cache else ()
        return self.o(merge_heads(out)), *none, position_bias

    def expanded(self: Any, bias: Tensor, given: dict[str, Any]) -> Tensor:
        return _pairs_in_blocks(bias, given.get("mask"), self.local_radius)


def _first(*values: Any) -> Any:
    """Return the first value that is not None: of the names that a cache has in releases."""
    return next((x for x in values if x is not None), None)


def _in_a_row(positions: Tensor) -> bool:
    message = "cache_position must have positions that follow one another"
    return condition_met((positions.diff() == 1).all(), message)


def _biases(module: Any, distances: Tensor) -> Tensor:
    """Return biases [H, T] of distances [T], of a module's own table."""
    buckets = t5_bucket_numbers(
        module.relative_attention_num_buckets, distances, not module.is_decoder, module.relative_attention_max_distance
    )
    biases: Tensor = module.relative_attention_bias(buckets)  # [T, H]
    return biases.t()


def _pairs_in_blocks(bias: Tensor, mask: Tensor | None, radius: int) -> Tensor:
    """Expand biases [H, 2 radius + 1] to LongT5's of all pairs in blocks, [B or 1, blocks or 1, H,
    block, 3 blocks], with the mask added."""
    size = radius + 1
    distances = torch.arange(size, device=bias.device).unsqueeze(1) + size - torch.arange(3 * size, device=bias.device)
    far = distances.abs() > radius
    pairs = bias[:, (distances + radius).clamp(0, 2 * radius)].masked_fill(far, -1e10)
    return pairs if mask is None else pairs + torch.where(mask > 0, 0.0, -1e10).transpose(1, 2)


def _cross_attention(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    crossing = bool(ancestors) and (
        getattr(ancestors[-1], "EncDecAttention", None) is module
        or type(ancestors[-1]).__name__ == "Pix2StructTextLayerCrossAttention"
    )
    return "cross-attention, which has no relative positions" if crossing else None


def _why_not_udop(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    if not module.is_decoder:
        return "its encoder adds biases of the boxes' places on the page, which differ between pairs at one distance"
    return T5.why_not_alone(module, ancestors)


_CHECKS = {"why_not_module": T5.why_not_alone, "why_nothing_to_do": _cross_attention}
PEERS = (
    peer("T5", "t5.T5Attention", T5,
         {"4.36.2": "863db93d9d9fcef9", "4.46.3": "6c57d8ae8065a671", "4.55.4": "9deec1282c1964c7",
          "4.56.2": "61c2b559b76f64cb", "4.57.6": "f1b3ad046a76cd93", "5.0.0": "e813df4ea5ec13f9",
          "5.5.4": "84805231e07c226c", "5.15.1": "fe1088cb009f7b48", "5.24.0": "b71ea11c679bbb47"}, **_CHECKS),
    peer("MT5", "mt5.MT5Attention", T5,
         {"4.36.2": "863db93d9d9fcef9", "4.46.3": "0f5976e9354b943b", "4.55.4": "dec9a0f003b0e601",
          "4.56.2": "2357c249218c4101", "4.57.6": "0f86c16fc690fa64", "5.0.0": "9824235aa99ea925",
          "5.5.4": "3baa30f05a94c41d", "5.15.1": "6d1e3bce068bec0c", "5.24.0": "b97397c624c1ecdb"}, **_CHECKS),
    peer("SwitchTransformers", "switch_transformers.SwitchTransformersAttention", T5,
         {"4.36.2": "863db93d9d9fcef9", "4.46.3": "a9b9d6ba48d54cd1", "4.55.4": "6834a49396926220",
          "4.56.2": "49ee2d3168bcc2f0", "4.57.6": "3d00c0c1d7467126", "5.15.1": "de37373a72fb1f8e",
          "5.24.0": "09316f819ba0a2dd"}, **_CHECKS),
    peer("Pop2Piano", "pop2piano.Pop2PianoAttention", T5,
         {"4.36.2": "863db93d9d9fcef9", "4.46.3": "28a2e3d565cec466", "4.55.4": "1ca8c29404c2fe2f",
          "4.56.2": "05163c2cfb6e993b", "4.57.6": "f878cdb9b6aa7a0f", "5.0.0": "ec2eb5fc489eea6b",
          "5.5.4": "0f7c23ded02fc960", "5.15.1": "b6949c8f1e87250f", "5.24.0": "43997068faddbc6e"}, **_CHECKS),
    peer("UDOP", "udop.UdopAttention", T5, {"5.24.0": "e25b4d0e2ff6ce1c"}, why_not_module=_why_not_udop,
         why_nothing_to_do=_cross_attention),
    peer("Pix2Struct", "pix2struct.Pix2StructTextAttention", Pix2Struct, {"5.24.0": "1e08761e8d5d8d0b"},
         why_not_module=Pix2Struct.why_not_alone, why_nothing_to_do=_cross_attention),
    peer("LongT5", "longt5.LongT5Attention", T5,
         {"4.36.2": "863db93d9d9fcef9", "4.46.3": "afd0ad6d57af764b", "4.55.4": "4f63c14c217a72fa",
          "4.56.2": "fb7af887ac275fb5", "4.57.6": "901d87ca64596f72", "5.0.0": "0f95070eebdf6ff8",
          "5.5.4": "283ca20ef339f10a", "5.15.1": "3f69760353b2284a", "5.24.0": "864392f4331222e4"}, **_CHECKS),
    peer("LongT5Local", "longt5.LongT5LocalAttention", LongT5Local,
         {"4.36.2": "10a7a15522e7cb9b", "4.55.4": "52c6d9797800f1b7", "5.0.0": "cdfdd9ae6c4fb750"},
         why_not_module=LongT5Local.why_not_alone),
    peer("LongT5TransientGlobal", "longt5.LongT5TransientGlobalAttention", Accelerated,
         {"5.24.0": "55d08ca5fc6a2a84"}, why_not_module=lambda module, ancestors: (
             "transient global attention: every query also sees the means of blocks, with biases of another kind")),
    peer("UMT5", "umt5.UMT5Attention", UMT5,
         {"5.15.1": "999f9ee5f86568fb", "5.24.0": "52a8175c2b58c9ad"}, why_nothing_to_do=_cross_attention),
)  # fmt: skip
