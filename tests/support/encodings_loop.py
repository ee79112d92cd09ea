"""Whole models by their definition: a float64 double loop over queries and keys, an encoding each.

Shares nothing with `txl` but the parameters: positions are looked up by index, nothing is shifted.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, relu

from txl import TransformerXL


def sinusoid_at(place: int, width: int) -> Tensor:
    """[width]: sines, then cosines (paper, section 3.3)."""
    half = [place / 10000 ** (2 * c / width) for c in range(width // 2)]
    return torch.tensor([math.sin(x) for x in half] + [math.cos(x) for x in half], dtype=torch.float64)


def scores_of(model: TransformerXL, layer: int, q: Tensor, k: Tensor, held: int) -> Tensor:
    """Scores [H, L, S] of q [H, L, D] and k [H, S, D], memory of `held` keys first."""
    attention, c = model.layers[layer].attention, model.config
    heads, length, keys = q.size(0), q.size(1), k.size(1)
    rows = []
    for h in range(heads):
        for i in range(length):
            row: list[Tensor] = []
            for j in range(keys):
                d = held + i - j
                if d < 0 or (c.window is not None and d >= c.window):
                    row.append(torch.tensor(-math.inf, dtype=torch.float64))
                    continue
                score = q[h, i] @ k[h, j]
                if c.encoding == "relative":
                    near = d if c.clamp_len is None else min(d, c.clamp_len)
                    r = linear(sinusoid_at(near, c.d_model), attention.r.weight).view(heads, -1)[h]
                    score = (q[h, i] + attention.content_bias[h]) @ k[h, j] + (q[h, i] + attention.position_bias[h]) @ r
                elif c.encoding in ("shaw", "shaw-released"):
                    row_of = min(d, c.table_len - 1)
                    score = score + q[h, i] @ attention.table[h, row_of]
                    if c.encoding == "shaw-released":
                        score = score + attention.content_bias[h] @ k[h, j] + attention.distance_bias[h, row_of]
                row.append(score / math.sqrt(c.d_head))
            rows.append(torch.stack(row))
    return torch.stack(rows).view(heads, length, keys)


def norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def read(model: TransformerXL, tokens: Tensor, memory: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
    """Last states [L, d_model] of one text's tokens [L], and the input of every layer [M + L, ..]:
    the memory, uncut, for the tokens that follow."""
    c = model.config
    hidden = model.embedding.tables[0][tokens] * math.sqrt(c.d_model)
    if c.encoding == "sinusoid":
        hidden = hidden + torch.stack([sinusoid_at(n, c.d_model) for n in range(len(tokens))])
    kept = []
    for n, block in enumerate(model.layers):
        if c.encoding == "learned":
            hidden = hidden + torch.stack([block.places[i] for i in range(len(tokens))])
        whole = torch.cat([memory[n], hidden]) if memory else hidden
        kept.append(whole)
        held = len(whole) - len(hidden)
        seen = norm(block.attention_norm, whole) if c.pre_norm else whole
        q, k, v = linear(seen, block.attention.qkv.weight).view(len(whole), 3, c.n_head, c.d_head).permute(1, 2, 0, 3)
        p = scores_of(model, n, q[:, held:], k, held).softmax(-1)
        attended = linear((p @ v).transpose(0, 1).flatten(1), block.attention.out.weight)
        hidden = hidden + attended
        first, _, _, second, _ = block.feed_forward
        if c.pre_norm:
            inner = norm(block.feed_forward_norm, hidden)
            hidden = hidden + second(relu(first(inner)))
        else:
            hidden = norm(block.attention_norm, hidden)
            hidden = norm(block.feed_forward_norm, hidden + second(relu(first(hidden))))
    if c.final_norm:
        hidden = norm(model.final_norm, hidden)
    return hidden, kept
