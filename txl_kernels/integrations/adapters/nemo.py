"""NeMo: Conformer and FastConformer encoders, offline, with limited context, and cache-aware.

The cache holds hidden frames; their keys and values are kept from step to step.
"""

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import (
    attend_table,
    dropout_of,
    mask_bounds,
    merge_heads,
    project_table,
    split_heads,
    unhidden,
)
from txl_kernels.integrations.peer import Accelerated, Peer
from txl_kernels.integrations.streaming import again, keep, worth_keeping


class NeMo(Accelerated):
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        pos_emb: Tensor,
        cache: Tensor | None = None,
    ) -> Any:
        dropout_p = self.dropout_rate * self.training if self.use_pytorch_sdpa else dropout_of(self.dropout)
        why = self.hindrance(query, dropout_p)
        bounds = mask_bounds(mask, unhidden) if why is None else None
        if bounds is None:
            return self.fall_back(why or "a mask with holes", query, key, value, mask, pos_emb, cache)
        before, frames = cache, query.size(1)
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        without_float16 = getattr(
            sys.modules[self.original.__module__], "avoid_float16_autocast_context", contextlib.nullcontext
        )
        with without_float16():
            q = split_heads(self.linear_q(query), self.h)
            k, v = self._keys_and_values(key, value, before, frames)
            project = self.linear_pos
            (r,) = again(self, "r", (project,), pos_emb, frames, lambda: (project_table(project, pos_emb, self.h),))
            out = attend_table(q, k, v, r, self.pos_bias_u, self.pos_bias_v, bounds, dropout_p=dropout_p)
            out = self.linear_out(merge_heads(out))
        if cache is None:
            return out
        self._keep(cache, k, v, frames)
        return out, cache

    def _keys_and_values(
        self: Any, key: Tensor, value: Tensor, cache: Tensor | None, frames: int
    ) -> tuple[Tensor, Tensor]:
        both = (self.linear_k, self.linear_v)

        def projected(of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
            return split_heads(self.linear_k(of_keys), self.h), split_heads(self.linear_v(of_values), self.h)

        if cache is None or not worth_keeping(self, both, cache, frames):
            return projected(key, value)
        k, v = again(self, "cache", both, cache, frames, lambda: projected(cache, cache))
        new = projected(key[:, cache.size(1) :], value[:, cache.size(1) :])
        return torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)

    def _keep(self: Any, cache: Tensor, k: Tensor, v: Tensor, frames: int) -> None:
        """What the next step's cache projects to: the last frames of this one's, less those that
        are dropped."""
        both, held = (self.linear_k, self.linear_v), cache.size(1)
        last = k.size(2) - self.cache_drop_size
        if 0 <= self.cache_drop_size <= frames and worth_keeping(self, both, cache, frames) and last >= held:
            keep(self, "cache", both, cache, (k[:, :, last - held : last], v[:, :, last - held : last]))


PEERS = (
    Peer("NeMoRelPosition", "nemo.collections.asr.parts.submodules.multi_head_attention.RelPositionMultiHeadAttention",
         NeMo, "nemo-toolkit", {"3.0.0": "b2dbb8feac2def2a"}),
)  # fmt: skip
