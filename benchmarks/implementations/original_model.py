"""The original algorithm as whole models: what training steps and evaluation speed are compared
with."""

import torch
from original import original_qkbh
from torch import Tensor, nn

from txl.model.transformer import TransformerXL
from txl_kernels import sinusoid

HiddenMemory = list[Tensor]  # hidden states of each layer, [M, B, d_model]


class OriginalTransformerXL(nn.Module):
    """Transformer-XL as its authors released it, on the weights of ours: [length, batch, width],
    memory of hidden states.

    Every segment projects keys, values (and queries) of memory and segment together and W_kR R
    anew, and builds the scores in full. It shares its parameters with `model`.
    """

    def __init__(self, model: TransformerXL, mem_len: int, window: int | None = None) -> None:
        super().__init__()
        self.model, self.mem_len, self.window = model, mem_len, window

    def forward(self, tokens: Tensor, memory: HiddenMemory | None = None) -> tuple[Tensor, HiddenMemory]:
        """Logits [B, L, vocab_size] of the tokens after tokens [B, L], and the memory for the
        segment that follows."""
        model = self.model
        hidden = model.embedding_dropout(model.embed(tokens.t()))
        length, held = hidden.size(0), memory[0].size(0) if memory else 0
        keys = held + length
        distances = torch.arange(keys - 1, -1, -1, device=tokens.device)
        if model.config.clamp_len is not None:
            distances = distances.clamp(max=model.config.clamp_len)
        positions = model.position_dropout(sinusoid(distances, model.config.d_model, hidden.dtype))
        everything = torch.ones(length, keys, dtype=torch.bool, device=tokens.device)
        unseen = everything.triu(1 + held)
        if self.window is not None:
            unseen |= everything.tril(held - self.window)
        kept = []
        for n, block in enumerate(model.layers):
            attention = block.attention
            whole = torch.cat([memory[n], hidden]) if memory else hidden
            kept.append(whole[max(keys - self.mem_len, 0) :].detach())
            heads = attention.qkv(block.attention_input(whole)).unflatten(-1, (3, attention.n_head, attention.d_head))
            q, k, v = heads.unbind(2)
            r = attention.r(positions).unflatten(-1, (attention.n_head, attention.d_head))
            out = original_qkbh(q[held:], k, v, r, attention.content_bias, attention.position_bias, unseen)
            hidden = block.after_attention(hidden, attention.out(out.flatten(-2)))
        return model.logits(model.finish(hidden)).transpose(0, 1), kept
