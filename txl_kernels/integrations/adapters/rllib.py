"""Ray RLlib: the attention of its GTrXL, which is always causal."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.integrations.attention import attend, merge_heads
from txl_kernels.integrations.peer import Accelerated, Peer, RandomInputs, Sample, width_of


class RLlib(Accelerated):
    needs = ("_qkv_layer", "_rel_pos_embedding", "_pos_proj", "_uvar")

    @staticmethod
    def sample(module: Any, inputs: RandomInputs, seen: Tensor | None) -> Sample:
        width = width_of(module._qkv_layer)
        memory = inputs.normal(inputs.B, 0 if seen is None else 5, width)
        return inputs.frames(width), lambda m, x: m(x, memory)

    def forward(self: Any, inputs: Tensor, memory: Tensor | None = None) -> Tensor | str:
        if memory is None:
            return "no memory"
        why = self.why_not_kernel(inputs)
        if why is not None:
            return why  # type: ignore[no-any-return]
        before = memory.size(1)
        inputs = torch.cat((memory.detach(), inputs), 1)
        if self._input_layernorm is not None:
            inputs = self._input_layernorm(inputs)
        heads, width = self._num_heads, self._head_dim
        q, k, v = self._qkv_layer(inputs).unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
        encodings = self._rel_pos_embedding(inputs.size(1))  # [T, 1, d] or [T, d], farthest past first
        r = self._pos_proj(encodings.flip(0)).reshape(-1, heads, width).transpose(0, 1)
        out = attend(q[:, :, before:], k, v, r, self._uvar, self._vvar, (None, None), zero_row=0, causal=True,
                     window=self.setting("window"))  # fmt: skip
        return self._linear_layer(merge_heads(out))  # type: ignore[no-any-return]


PEERS = (
    Peer("RLlibRelative", "ray.rllib.models.torch.modules.relative_multi_head_attention.RelativeMultiHeadAttention",
         RLlib, "ray", {"2.60.0": "a6aa34c74e0ccbe6"}),
)  # fmt: skip
