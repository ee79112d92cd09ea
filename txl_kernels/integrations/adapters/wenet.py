"""WeNet's attention with a shifted table of positions, as in CosyVoice and its copies: ESPnet's
formula with a cache of keys and values."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import attend_encodings, bounds_or_reason, dropout_of
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of

NO_MASK = torch.ones((0, 0, 0), dtype=torch.bool, device="cpu")
NO_ENCODINGS, NO_CACHE = (torch.empty(shape, dtype=torch.float32, device="cpu") for shape in (0, (0, 0, 0, 0)))


class WeNet(Accelerated):
    skips = ("dropout",)
    needs = ("forward_qkv", "linear_pos", "pos_bias_u", "pos_bias_v", "rel_shift", "h", "d_k")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        width, mask = width_of(module.linear_pos), NO_MASK if seen is None else inputs.narrow(seen)
        held = 5 if seen is None else 0
        table = inputs.table(width, inputs.T - 1 + held, inputs.T - 1 + held)
        cache = inputs.normal(inputs.B, module.h, held, 2 * module.d_k) if held else NO_CACHE
        return inputs.frames(width), lambda m, x: m(x, x, x, mask, table, cache)

    def forward(
        self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor = NO_MASK, pos_emb: Tensor = NO_ENCODINGS,
        cache: Tensor = NO_CACHE,
    ) -> Any:  # fmt: skip
        dropout_p = dropout_of(self.dropout)
        why = self.why_not_kernel(query, dropout_p)
        held = cache.size(2) if cache.size(0) > 0 else 0
        keys = held + key.size(1)
        if query.size(1) != key.size(1):
            why = "queries and keys of different lengths"
        elif pos_emb.dim() != 3 or pos_emb.size(1) != 2 * keys - 1:
            why = "encodings of other positions: with as many as keys it adds them without a shift"
        shown = mask[:, :, :keys] if mask.size(2) > keys else mask  # none of them if it is empty
        bounds = bounds_or_reason(why, shown if mask.size(2) else None, Tensor.bool, keys=keys)
        if isinstance(bounds, str):
            return bounds
        q, k, v = self.forward_qkv(query, key, value)
        if cache.size(0) > 0:
            before = cache.chunk(2, -1)
            k, v = (torch.cat([old, new], 2) for old, new in zip(before, (k, v), strict=True))
        out = attend_encodings(self, q, k, v, pos_emb, bounds, dropout_p=dropout_p)
        return self.linear_out(out), torch.cat((k, v), -1)


PEERS = (
    Peer("CosyVoice", "cosyvoice.transformer.attention.RelPositionMultiHeadedAttention", WeNet, "cosyvoice2-eu",
         {"0.2.8": "3b909f2c9ca39382", "chatterbox-tts 0.1.7": "083ed3b1aad87b0c"}),
    Peer("WeNetUnshifted", "indextts.gpt.conformer.attention.RelPositionMultiHeadedAttention", WeNet,
         "indextts2-inference", {"2.1.1": "154d90454687dff3"}, why_nothing_to_do=lambda module, ancestors: (
             "no relative positions: WeNet's own adds encodings of absolute ones, without a shift")),
)  # fmt: skip
