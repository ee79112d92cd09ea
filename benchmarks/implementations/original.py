"""The original algorithm in plain code: attention alone, to compare with rel_attention, and whole
models, to compare training steps and evaluation speed.

Scores are built in full; the relative shift pads one column and reshapes (paper, appendix B).
"""

import torch
from torch import Tensor, nn

from txl.model.transformer import TransformerXL
from txl_kernels import sinusoid

HiddenMemory = list[Tensor]  # hidden states of each layer, [M, B, d_model]


def shift_qkbh(x: Tensor) -> Tensor:
    """Apply the relative shift to scores [q, k, b, h] whose k axis runs over distances S-1 .. 0."""
    padded = torch.cat([x.new_zeros(x.size(0), 1, *x.shape[2:]), x], 1)
    return padded.view(x.size(1) + 1, x.size(0), *x.shape[2:])[1:].view_as(x)


def original_qkbh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute causal attention in the original's layout.

    q [L, B, H, D]; k, v [S, B, H, D], memory first; r [S, H, D], distances S-1 .. 0; biases [H, D];
    hidden: bool [L, S], True for pairs to mask, None for the causal mask. Returns [L, B, H, D].
    """
    length, keys = q.size(0), k.size(0)
    if hidden is None:
        hidden = torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(1 + keys - length)
    content = torch.einsum("ibnd,jbnd->ijbn", q + content_bias, k)
    position = shift_qkbh(torch.einsum("ibnd,jnd->ijbn", q + position_bias, r))
    score = (content + position).mul_(q.size(-1) ** -0.5)
    p = score.masked_fill(hidden[:, :, None, None], -torch.inf).softmax(1)
    return torch.einsum("ijbn,jbnd->ibnd", p, v)


def shift_bhls(x: Tensor) -> Tensor:
    """Apply the relative shift to scores [b, h, q, k] whose k axis runs over distances S-1 .. 0."""
    batch, heads, length, keys = x.shape
    padded = torch.cat([x.new_zeros(batch, heads, length, 1), x], 3)
    return padded.view(batch, heads, keys + 1, length)[:, :, 1:].reshape(x.shape)


def position_bhls(q: Tensor, r: Tensor, position_bias: Tensor) -> Tensor:
    """Compute unscaled positional scores [B, H, L, S] from q [B, H, L, D] and r [H, S, D] for
    distances S-1 .. 0."""
    return shift_bhls(torch.einsum("bhld,hsd->bhls", q + position_bias[:, None], r))


def original_bhls(q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor) -> Tensor:
    """Compute the same attention in [B, H, L, S], the layout that suits batched matrix products.

    q [B, H, L, D]; k, v [B, H, S, D], memory first; r [H, S, D], distances S-1 .. 0; biases [H, D].
    """
    length, keys = q.size(2), k.size(2)
    content = (q + content_bias[:, None]) @ k.mT
    score = (content + position_bhls(q, r, position_bias)).mul_(q.size(-1) ** -0.5)
    hidden = torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(1 + keys - length)
    return score.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def original_absolute_qkbh(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention without relative positions in the same layout, as in the published
    vanilla model."""
    length = q.size(0)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    score = torch.einsum("ibnd,jbnd->ijbn", q, k).mul_(q.size(-1) ** -0.5)
    p = score.masked_fill(hidden[:, :, None, None], -torch.inf).softmax(1)
    return torch.einsum("ijbn,jbnd->ibnd", p, v)


def shift_both(x: Tensor) -> Tensor:
    """Apply the relative shift to scores [b, h, q, 2 q - 1] over distances L-1 .. -(L-1) -> [b, h,
    q, q] (Conformer, XLNet)."""
    batch, heads, length, _ = x.shape
    padded = torch.cat([x.new_zeros(batch, heads, length, 1), x], 3).view(batch, heads, 2 * length, length)
    return padded[:, :, 1:].reshape(batch, heads, length, 2 * length - 1)[..., :length]


class OriginalTransformerXL(nn.Module):
    """Transformer-XL as its authors released it, with the weights of a txl model, activations
    [length, batch, width], and a memory of hidden states.

    For every segment it projects queries, keys and values of memory and segment together, projects
    W_kR R again, and builds the scores in full. It shares its parameters with `model`.
    """

    def __init__(self, model: TransformerXL, mem_len: int, window: int | None = None) -> None:
        super().__init__()
        self.model, self.mem_len, self.window = model, mem_len, window

    def forward(self, tokens: Tensor, memory: HiddenMemory | None = None) -> tuple[Tensor, HiddenMemory]:
        """Return logits [B, L, vocab_size] of the tokens after tokens [B, L], and the memory for
        the next segment."""
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
