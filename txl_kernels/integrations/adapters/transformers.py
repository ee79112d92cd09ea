"""The speech encoders of transformers, and XLNet (Yang et al. 2019)."""

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels.integrations.attention import (
    ALL,
    OTHER_KEYS,
    Bounds,
    attend,
    attend_encodings,
    bounds_of,
    bounds_or_reason,
    condition_met,
    dropout_of,
    first_if_same,
    memoized,
    merge_heads,
    split_heads,
    visible,
    why_not_read,
)
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of

SEGMENTS = 8  # the largest number of segments in a batch row; head widths grow by it, a multiple of 8


def peer(name: str, original: str, adapter: type[Accelerated], hashes: dict[str, str], **checks: Any) -> Peer:
    """Return the `Peer` of a class of transformers. original: the model's folder and the class."""
    model, _, kind = original.partition(".")
    path = f"transformers.models.{model}.modeling_{model}.{kind}"
    return Peer(name, path, adapter, "transformers", hashes, **checks)


def attentions_wanted(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call must return attention weights: by an argument, the configuration, or
    transformers' collector of outputs."""
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    if torch.compiler.is_compiling():  # the collector does not work there either
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    wanted = None if collector is None else collector.get()
    return wanted is not None and "attentions" in wanted


IMPLEMENTATIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


def implementation_of(module: Any) -> str | None:
    """Return the name of the attention function in the module's configuration, or None."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name


def masks_of_interface(module: Any) -> tuple[str, ...]:
    """Return `Accelerated.mask_forms` of a class with transformers' attention interface: eager code
    adds masks, sdpa takes both."""
    return ("bool", "additive") if implementation_of(module) == "sdpa" else ("additive",)


def why_not_interface(module: Any, kwargs: dict[str, Any]) -> str | None:
    """Return the reason why the original must answer a call, whatever its tensors are, or None."""
    if attentions_wanted(module, kwargs) and module.setting("weights") == "fallback":
        return "attention weights asked for"
    implementation = implementation_of(module)
    return None if implementation in IMPLEMENTATIONS else f"an attention function of one's own, {implementation!r}"


def interface_bounds(why: str | None, mask: Any, keys: int | None) -> Bounds | str:
    """Return the result of `bounds_or_reason` for a mask of transformers' attention interface, [B,
    1, L, S], bool or additive."""
    if why is None and mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            why = "a mask of another kind"
        elif mask.size(1) != 1:
            why = "a mask for each head"
    return bounds_or_reason(why, mask, visible, keys=keys)


def check_keys(mask: Tensor | None, keys: int) -> None:
    """Check that a mask [.., S] has the number of keys that a cache returned.

    Raises:
        ValueError: it has another.
    """
    if mask is not None and mask.size(-1) != keys:
        raise ValueError(f"the mask must have a column for each of the {keys} keys, got shape {list(mask.shape)}")


class HFConformer(Accelerated):
    """Wav2Vec2-Conformer, Wav2Vec2-BERT, SeamlessM4T v1 and v2.

    "relative" is the paper's attention. "relative_key" is Shaw's: one clamped table for all heads,
    without biases; row left + (j - i) of `distance_embedding` belongs to key j and query i.
    """

    needs = ("linear_q", "linear_out", "position_embeddings_type", "num_heads", "head_size")
    reads = ("output_attentions",)

    mask_forms = staticmethod(masks_of_interface)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        given: dict[str, Any] = {"attention_mask": inputs.mask(seen)}
        if module.position_embeddings_type == "relative":
            given["relative_position_embeddings"] = inputs.table(width_of(module.linear_q))
        parameters = inspect.signature(type(module).forward).parameters.values()
        if seen is not None and any(x.kind is x.VAR_KEYWORD for x in parameters):
            given["use_cache"] = True  # which Seamless passes on
        return inputs.frames(width_of(module.linear_q)), lambda m, x: m(x, **given)

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None,
        relative_position_embeddings: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        dropout_p = float(self.dropout.p) if self.training else 0.0
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        boolean = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool
        if boolean and implementation_of(self) in (None, "eager"):
            why = why or "a bool mask, which eager attention adds to scores"
        bounds = interface_bounds(why, attention_mask, hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.linear_q, self.linear_k, self.linear_v))
        settings = {"scale": self.head_size**-0.5, "dropout_p": dropout_p}
        if self.position_embeddings_type == "relative_key":
            past = self.left_max_position_embeddings
            rows = torch.arange(past + self.right_max_position_embeddings, -1, -1, device=q.device)
            r = self.distance_embedding(rows).to(q.dtype).unsqueeze(0)
            window = self.setting("window")
            out = attend(q, k, v, r, None, None, bounds, past=past, outside="clamp", window=window, **settings)
            return self.linear_out(merge_heads(out)), None
        if relative_position_embeddings is None:
            raise ValueError("relative_position_embeddings must be given where position_embeddings_type is 'relative'")
        out = attend_encodings(self, q, k, v, relative_position_embeddings, bounds, **settings)
        return self.linear_out(out), None


def is_one(mask: Tensor) -> Tensor:
    """Return where a mask is one, as bool: the visible keys of transformers' masks of tokens."""
    return mask if mask.dtype == torch.bool else mask == 1


def _why_not(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    kind = module.position_embeddings_type
    return None if kind in ("relative", "relative_key") else f"position_embeddings_type is {kind!r}"


def _without_positions(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return "no relative positions" if module.position_embeddings_type is None else None


class Parakeet(Accelerated):
    """The attention of Parakeet's encoder, and of Nemotron's, which streams with a cache of keys
    and values."""

    needs = ("q_proj", "relative_k_proj", "bias_u", "bias_v", "head_dim", "num_key_value_groups")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        mask = inputs.mask(seen)
        table = inputs.table(width_of(module.relative_k_proj)).expand(inputs.B, -1, -1)
        return inputs.frames(width_of(module.q_proj)), lambda m, x: m(x, table, attention_mask=mask)

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,  # its new name since 5.24
        **kwargs: Any,
    ) -> tuple[Tensor, None] | str:
        dropout_p = float(self.attention_dropout) if self.training else 0.0
        why = why_not_interface(self, kwargs) or self.why_not_kernel(hidden_states, dropout_p)
        if isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool:
            why = "an additive mask"
        given = cache is not None or past_key_values is not None
        bounds = interface_bounds(why, attention_mask, None if given else hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        width = self.head_dim
        q, k, v = (split_heads(f(hidden_states), width=width) for f in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        elif past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        check_keys(attention_mask, k.size(2))
        dropped = self.training and getattr(self.config, "dropout_positions", 0.0) > 0
        shared = None if dropped else first_if_same(position_embeddings)
        out = attend_encodings(
            self, q, k, v, position_embeddings if shared is None else shared, bounds, self.relative_k_proj, self.bias_u,
            self.bias_v, scale=self.scaling, dropout_p=dropout_p,
        )  # fmt: skip
        return self.o_proj(out), None


class FastSpeech2(Accelerated):
    """The attention of FastSpeech2-Conformer."""

    skips = ("dropout",)
    needs = ("linear_q", "linear_pos", "pos_bias_u", "pos_bias_v", "num_heads")

    @staticmethod
    def mask_forms(module: Any) -> tuple[str, ...]:
        return ("bool", "integer", "real")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table, mask = (
            inputs.table(width_of(module.linear_pos)),
            None if seen is None else ~inputs.padding(seen).unsqueeze(1),
        )
        if mask is not None and inputs.form != "bool":
            mask = mask.long() if inputs.form == "integer" else mask.float()
        return inputs.frames(width_of(module.linear_q)), lambda m, x: m(x, mask, table)

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, pos_emb: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, None] | str:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(hidden_states, dropout_p)
        if output_attentions and self.setting("weights") == "fallback":
            why = "attention weights asked for"
        if pos_emb is None:
            return why or "no encodings of positions"
        bounds = bounds_or_reason(why, attention_mask, Tensor.bool, keys=hidden_states.size(1))
        if isinstance(bounds, str):
            return bounds
        heads = self.num_heads
        q, k, v = (split_heads(f(hidden_states), heads) for f in (self.linear_q, self.linear_k, self.linear_v))
        return self.linear_out(attend_encodings(self, q, k, v, pos_emb, bounds, dropout_p=dropout_p)), None


class XLNet(Accelerated):
    """The attention of XLNet (Yang et al. 2019).

    Its third term depends on whether query and key are of one segment: e_s(i, j) = (q_i + s) . E_s
    with s = 0 or 1. e_1 is the same for all keys of a query, so it cancels in the softmax. The
    rest, (e_0 - e_1)_i for keys of i's own segment, is expressed by additional features: one for
    each segment, one-hot in the keys.
    """

    method = "rel_attn_core"
    skips = ("dropout",)
    needs = ("r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Return the entry "bi_data": whether the model gives the two halves of the batch different
        encodings."""
        configs = [m.config for m in ancestors if hasattr(m, "config")]
        return {"bi_data": any(getattr(config, "bi_data", False) for config in configs)} if configs else {}

    @staticmethod
    def mask_forms(module: Any) -> tuple[str, ...]:
        return ("additive", "integer")  # both real; the second without memory and segments

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        width, heads, head_dim = module.q.shape
        held = 5 if inputs.form == "additive" else 0
        keys, frames = held + inputs.T, inputs.frames(width)
        memory, encodings = inputs.normal(inputs.B, held, width), inputs.normal(keys + inputs.T, 1, heads, head_dim)
        encodings = encodings.expand(-1, inputs.B, -1, -1)
        mask, segments = None, None
        if seen is not None:
            mask = F.pad(~seen, (held, 0)).permute(1, 2, 0).unsqueeze(-1).float()
        if held:
            other = torch.arange(keys, device="cpu") % 3 == 0
            segments = (
                F.one_hot((other[held:, None] != other).long(), 2).float().unsqueeze(2).expand(-1, -1, inputs.B, -1)
            )

        def call(m: Any, x: Tensor) -> Tensor:
            q, k, v = (
                torch.einsum("bih,hnd->ibnd", y, p)
                for y, p in ((x, m.q), (torch.cat([memory, x], 1), m.k), (torch.cat([memory, x], 1), m.v))
            )
            out: Tensor = m.rel_attn_core(q, k, v, encodings, seg_mat=segments, attn_mask=mask)
            return out.transpose(0, 1)

        return frames, call

    def rel_attn_core(
        self: Any, q_head: Tensor, k_head_h: Tensor, v_head_h: Tensor, k_head_r: Tensor, seg_mat: Tensor | None = None,
        attn_mask: Tensor | None = None, output_attentions: bool = False,
    ) -> Any:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(q_head, dropout_p)
        if output_attentions:  # the caller unpacks a pair
            why = "attention weights asked for"
        keys, length = k_head_h.size(0), q_head.size(0)
        if attn_mask is None and k_head_r.size(0) < keys + length:
            why = "no mask, and no encodings of keys ahead"
        elif attn_mask is not None and attn_mask.size(1) != keys:
            why = OTHER_KEYS
        why = why or why_not_read(attn_mask) or why_not_read(seg_mat)
        intervals: list[Bounds] | None = [ALL]
        if why is None and attn_mask is not None:
            intervals = memoized("mask", attn_mask, "xlnet", lambda: _intervals(attn_mask))
        features = None
        if why is None and seg_mat is not None:
            features = _segments(seg_mat[..., 0])
            why = "more than 8 segments in a batch row" if features is None else None
        if why is not None or intervals is None:
            return why or "a mask with holes"
        # No pair of query and key has the distance of row 0.
        each_row = self.setting("bi_data") or (self.training and self.dropout.p > 0)
        shared = None if each_row else first_if_same(k_head_r, 1)
        r = (k_head_r if shared is None else shared)[1:].flip(0).permute(1, 2, 0, 3)  # [B or 1, H, T, D]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
        u, w = self.r_w_bias, self.r_r_bias
        if features is not None:
            of_queries, of_keys = features
            e = torch.einsum("bhid,shd->bhis", q + self.r_s_bias[:, None], self.seg_embed)
            own = (e[..., 0] - e[..., 1]).unsqueeze(-1) * of_queries.unsqueeze(1).to(q.dtype)
            q = torch.cat([q, own], -1)
            k = torch.cat([k, of_keys.unsqueeze(1).expand(-1, k.size(1), -1, -1).to(k.dtype)], -1)
            r, u, w = (F.pad(x, (0, SEGMENTS)) for x in (r, u, w))
        out = attend(q, k, v, r if shared is None else r[0], u, w, *intervals, scale=self.scale, dropout_p=dropout_p,
                           window=self.setting("window"))  # fmt: skip
        return out.permute(2, 0, 1, 3)


def _intervals(mask: Tensor) -> list[Bounds] | None:
    """Return disjoint intervals of keys that queries see, of a mask [q, k, B, 1], non-zero where
    hidden.

    They are one of the memory, one of the segment, and the query's own key, which XLNet leaves
    visible to padding tokens. None if the mask needs others.
    """
    seen = (mask[..., 0] == 0).permute(2, 0, 1)  # [B, q, k]
    whole = None if torch.compiler.is_compiling() else bounds_of(seen)
    if whole is not None:
        return [whole]
    length, keys = seen.shape[1:]
    earlier, own = seen[..., : keys - length], seen[..., keys - length :]
    alone = (own.sum(1) == 1) & own.diagonal(dim1=1, dim2=2)  # [B, q]: keys that only their own query sees
    rest, before = bounds_of(own & ~torch.diag_embed(alone)), bounds_of(earlier)
    if rest is None or before is None:
        return None
    at = torch.arange(keys - length, keys, dtype=torch.int32, device=mask.device)
    zeros = torch.zeros_like(at)
    itself = torch.where(alone, at, zeros), torch.where(alone, at + 1, zeros)
    start, end = (zeros[:1] if x is None else x + (keys - length) for x in rest)
    found: list[Bounds] = [(start, end), itself]
    return found if keys == length else [before, *found]


def _segments(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the one-hot segments of queries [B, q, 8] and of keys [B, k, 8]; None if there are
    more than 8.

    matrix: [q, k, B], non-zero where query and key are of one segment.
    """
    same = matrix != 0
    length = same.size(0)
    own = same[:, same.size(1) - length :]
    leader = own.to(torch.int8).argmax(1)  # [q, B]: the first query of its segment
    leads = leader == torch.arange(length, device=same.device).unsqueeze(1)
    number = (leads.cumsum(0) - 1).gather(0, leader)
    message = "a batch row has more than 8 segments, more than a compiled call takes"
    if not condition_met((number < SEGMENTS).all(), message):
        return None
    of_queries = F.one_hot(number.clamp(max=SEGMENTS - 1), SEGMENTS).to(torch.float32)
    leaders = leads.unsqueeze(-1) * of_queries  # [q, B, 8]
    of_keys = torch.einsum("qkb,qbc->bkc", same.to(torch.float32), leaders)
    return of_queries.transpose(0, 1), of_keys


_CHECKS = {"why_not_module": _why_not, "why_nothing_to_do": _without_positions}
PEERS = (
    peer("Wav2Vec2Conformer", "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention", HFConformer,
         {"4.36.2": "4f13dfb2bc13c01d", "5.17.0": "524dbb017d83847d"}, **_CHECKS),
    peer("Wav2Vec2Bert", "wav2vec2_bert.Wav2Vec2BertSelfAttention", HFConformer,
         {"4.40.2": "30a166bb219da30b", "5.17.0": "b42642b814090788"}, **_CHECKS),
    peer("SeamlessM4T", "seamless_m4t.SeamlessM4TConformerSelfAttention", HFConformer,
         {"4.36.2": "8368b29ea0bbb090", "5.17.0": "377086f18c872613"}, **_CHECKS),
    peer("SeamlessM4Tv2", "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention", HFConformer,
         {"4.36.2": "d9073b2a2e33c499", "5.17.0": "2e07dc97a9562b4f"}, **_CHECKS),
    peer("ParakeetEncoder", "parakeet.ParakeetEncoderAttention", Parakeet,
         {"4.57.6": "de19d35dc5544ea3", "5.0.0": "7c8087e250db0e88", "5.5.4": "a17b98bbf11afe56",
          "5.19.0": "1ea741de8ee28f81", "5.24.0": "c3b7b0db91e25282"}),
    peer("NemotronStreaming", "nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention", Parakeet,
         {"5.13.1": "aa7fc1c2dde145e7", "5.24.0": "d5804ba7d4ad9cd6"}),
    peer("FastSpeech2Conformer", "fastspeech2_conformer.FastSpeech2ConformerAttention", FastSpeech2,
         {"4.40.2": "d6716cc37f98f115"}),
    peer("XLNet", "xlnet.XLNetRelativeAttention", XLNet, {"4.36.2": "9750f021fa51b655", "5.0.0": "83046962db855bf2"}),
    peer("Phi4MultimodalAudio", "phi4_multimodal.Phi4MultimodalAudioAttention", Accelerated,
         {"5.24.0": "a639cacff936c9f8"}, why_not_module=lambda module, ancestors: (
             "its bias of all pairs comes added to its bool mask, which hides nothing: it adds 0 and 1 to scores")),
)  # fmt: skip
