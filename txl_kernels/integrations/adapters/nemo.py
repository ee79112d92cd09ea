"""NeMo: the attention of Conformer and FastConformer encoders (offline, with limited context,
local, and cache-aware), and of its Transformer encoder.

The cache holds hidden frames; their keys and values are kept from step to step.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.integrations.attention import (
    ALL,
    Bounds,
    attend,
    attend_encodings,
    bounds_of,
    bounds_or_reason,
    dropout_of,
    intersect,
    is_true,
    is_zero,
    memoized,
    merge_heads,
    project_table,
    split_heads,
)
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of
from txl_kernels.integrations.streaming import cached, should_cache, store


class NeMo(Accelerated):
    skips = ("dropout",)
    needs = ("linear_q", "linear_pos", "pos_bias_u", "pos_bias_v", "update_cache")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        table = inputs.table(width_of(module.linear_pos))
        hidden = None if seen is None else ~seen
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, hidden, table)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Any:
        sdpa = getattr(self, "use_pytorch_sdpa", False)  # since 2.1
        dropout_p = self.dropout_rate * self.training if sdpa else dropout_of(self.dropout)
        why = self.why_not_kernel(query, dropout_p)
        bounds = bounds_or_reason(why, mask, is_zero, keys=key.size(1) + (0 if cache is None else cache.size(1)))
        if isinstance(bounds, str):
            return bounds
        before, frames = cache, query.size(1)
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        with _without_float16(self):
            q = split_heads(self.linear_q(query), self.h)
            k, v = self._keys_and_values(key, value, before, frames)
            out = self.linear_out(attend_encodings(self, q, k, v, pos_emb, bounds, dropout_p=dropout_p))
        if cache is None:
            return out
        self._store(cache, k, v, frames)
        return out, cache

    def _keys_and_values(
        self: Any, key: Tensor, value: Tensor, cache: Tensor | None, frames: int
    ) -> tuple[Tensor, Tensor]:
        both = (self.linear_k, self.linear_v)

        def projected(of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
            return split_heads(self.linear_k(of_keys), self.h), split_heads(self.linear_v(of_values), self.h)

        if cache is None or not should_cache(self, both, cache, frames):
            return projected(key, value)
        k, v = cached(self, "cache", both, cache, frames, lambda: projected(cache, cache))
        new = projected(key[:, cache.size(1) :], value[:, cache.size(1) :])
        return torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)

    def _store(self: Any, cache: Tensor, k: Tensor, v: Tensor, frames: int) -> None:
        """Store the keys and values of the next step's cache: the last frames of this step's,
        without those that are dropped."""
        both, held = (self.linear_k, self.linear_v), cache.size(1)
        last = k.size(2) - self.cache_drop_size
        if 0 <= self.cache_drop_size <= frames and should_cache(self, both, cache, frames) and last >= held:
            store(self, "cache", both, cache, (k[:, :, last - held : last], v[:, :, last - held : last]))


def _without_float16(module: Any) -> Any:
    """Return the context of NeMo's own guard against overflow of float16, if it has one."""
    return getattr(module.beside, "avoid_float16_autocast_context", contextlib.nullcontext)()


class NeMoLocal(Accelerated):
    """`rel_pos_local_attn`: attention to `att_context_size` frames, in overlapping chunks.

    Let w be the larger side. The scores have a column for each of the distances w .. -w. The left
    and right positional terms are added to the first and last columns. If the sides differ, the
    shorter side's terms therefore belong to greater distances, and the columns between have none.
    """

    skips = ("dropout",)
    needs = ("att_context_size", "global_tokens", "sliding_chunks_matmul_qk", "linear_pos", "pos_bias_u")

    @staticmethod
    def sample_length(module: Any, least: int) -> int:
        return max(2 * int(max(module.att_context_size)) + 5, least)

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        hidden = inputs.padding(seen)  # it supports no other mask
        table = inputs.table(width_of(module.linear_pos), *module.att_context_size)
        return inputs.frames(width_of(module.linear_pos)), lambda m, x: m(x, x, x, hidden, table)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, pad_mask: Tensor, pos_emb: Tensor, cache: Tensor | None = None
    ) -> Any:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(query, dropout_p)
        left, right = self.att_context_size
        if cache is not None:
            why = "a cache"
        elif min(left, right) < 0 or max(left, right) <= 0 or pos_emb.size(1) != left + right + 1:
            why = "an unlimited context, or encodings of another"
        bounds = bounds_or_reason(why, pad_mask, is_zero, keys=key.size(1))
        if isinstance(bounds, str):
            return bounds
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        w = max(left, right)
        with _without_float16(self):
            q, k, v = (
                split_heads(f(x), self.h)
                for f, x in ((self.linear_q, query), (self.linear_k, key), (self.linear_v, value))
            )
            r = project_table(self.linear_pos, pos_emb, self.h)  # distances -right .. left
            none = r.new_zeros(*r.shape[:-2], 2 * w - left - right, r.size(-1))
            r = torch.cat([r[..., : right + 1, :], none, r[..., right + 1 :, :]], -2)  # -w .. w
            out = attend(
                q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, zero_row=w, dropout_p=dropout_p,
                window=intersect((left, right), self.setting("window")),
            )  # fmt: skip
            return self.linear_out(merge_heads(out).masked_fill(pad_mask.unsqueeze(-1), 0.0))


class NeMoTransformer(Accelerated):
    """The attention of the Transformer encoder, with FlexAttention's masks. It has no dropout of
    attention weights."""

    needs = ("w_qkv", "qk_norm", "linear_pos", "pos_bias_u", "_uses_rel_pos")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        from torch.nn.attention.flex_attention import create_block_mask

        mask = None
        if seen is not None:
            mask = create_block_mask(
                lambda b, h, i, j: seen[b, i, j], B=inputs.B, H=1, Q_LEN=inputs.T, KV_LEN=inputs.T, device="cpu"
            )
        table = inputs.table(module.d_model)
        return inputs.frames(module.d_model), lambda m, x: m(x, block_mask=mask, pos_emb=table)

    def forward(self: Any, x: Tensor, block_mask: Any = None, pos_emb: Tensor | None = None) -> Tensor | str:
        if pos_emb is None:
            return "no encodings of positions"
        why = self.why_not_kernel(x)
        bounds = why or (ALL if block_mask is None else _of_block_mask(block_mask, x.size(1), x.device))
        if bounds is None or isinstance(bounds, str):
            return bounds or "a mask with holes, or of another kind"
        q, k, v = self.w_qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        u, w = (bias.to(q.dtype) for bias in (self.pos_bias_u, self.pos_bias_v))
        return self.out_proj(attend_encodings(self, q, k, v, pos_emb, bounds, u=u, w=w))  # type: ignore[no-any-return]


def _of_block_mask(mask: Any, length: int, device: torch.device) -> Bounds | None:
    """Return the bounds of a BlockMask, computed from its function of indices, and kept by the
    tensor of its blocks, which each mask has for itself. None for a mask of each head, a mask with
    holes, or if the blocks disagree with the function."""
    return memoized("block mask", mask.kv_indices, (length, device), lambda: _from_function(mask, length, device))


def _from_function(mask: Any, length: int, device: torch.device) -> Bounds | None:
    blocks = mask.to_dense().bool()  # [B, H, queries / size, keys / size]
    if blocks.size(1) != 1 or tuple(mask.seq_lengths) != (length, length):
        return None
    batch_rows = torch.arange(blocks.size(0), device=device).view(-1, 1, 1)
    at = torch.arange(length, device=device)
    none = batch_rows.new_zeros(1, 1, 1)
    seen = mask.mask_mod(batch_rows, none, at.view(1, -1, 1), at.view(1, 1, -1))
    if seen.dtype != torch.bool or seen.dim() != 3:
        return None
    seen = seen.expand(blocks.size(0), -1, length)
    rows, columns = mask.BLOCK_SIZE
    any_of = nn.functional.pad(seen, (0, -length % columns)).unflatten(-1, (-1, columns)).any(-1)
    if any_of.size(1) > 1:
        any_of = nn.functional.pad(any_of, (0, 0, 0, -length % rows)).unflatten(1, (-1, rows)).any(2)
    return bounds_of(seen) if is_true((any_of == blocks[:, 0]).all(), True) else None


PEERS = (
    Peer("NeMoRelPosition", "nemo.collections.asr.parts.submodules.multi_head_attention.RelPositionMultiHeadAttention",
         NeMo, "nemo-toolkit", {"1.23.0": "344cf20c6a4fd74e", "2.0.0": "241bb0fc1a4944a0", "2.2.1": "b8a68208ace94f4d"}),
    Peer("NeMoLocal",
         "nemo.collections.asr.parts.submodules.multi_head_attention.RelPositionMultiHeadAttentionLongformer",
         NeMoLocal, "nemo-toolkit",
         {"1.23.0": "348f11e76953d0fd", "2.0.0": "d6467ea3c4876745", "2.2.1": "9a9592235a79dedd"},
         why_not_module=lambda module, _: "has global tokens" if module.global_tokens else None),
    Peer("NeMoTransformer", "nemo.collections.asr.modules.transformer_encoder.MultiHeadAttention", NeMoTransformer,
         "nemo-toolkit", {"3.0.0": "f6db2c1058357dc5"},
         why_nothing_to_do=lambda module, _: None if module._uses_rel_pos else "no relative positions"),
)  # fmt: skip
