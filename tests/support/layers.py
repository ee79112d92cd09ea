"""Attention layers in every option, and their definition in dense products."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import LearnedRelativeAttention, RelAttention, sinusoid

WIDTH, HEADS, EXTENT = 12, 4, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1},
    "window": {"window": 4},
    "bidirectional": {"causal": False},
    "chunks": {"causal": False, "chunk": (3, 2)},
    "clamped": {"clamp_len": 3},
    "wide heads": {"d_head": 5},
    "biases": {"bias": True},
    "length first": {"batch_first": False, "n_kv_head": 2},
    "learned": {"extent": EXTENT},
    "learned, one key head": {"extent": EXTENT, "n_kv_head": 1},
    "learned, norms": {"extent": EXTENT, "qk_norm": True},
    "learned, sink": {"extent": EXTENT, "sink": True},
    "learned, window": {"extent": EXTENT, "window": 4},
    "learned, scale": {"extent": EXTENT, "scale": 0.125, "position_width": 3},
    "learned, wide heads": {"extent": EXTENT, "d_head": 5, "position_width": 8},
    "learned, bidirectional": {"extent": EXTENT, "causal": False},
    "learned, every option": {
        "extent": EXTENT, "n_kv_head": 2, "qk_norm": True, "sink": True, "window": (7, 0), "scale": 0.2,
        "position_width": 2, "batch_first": False,
    },
}  # fmt: skip


def layer(name: str = "plain", **more: Any) -> Any:
    """A layer in float64 for evaluation, whose parameters are all random."""
    options = {"dtype": torch.float64} | OPTIONS[name] | more
    it = (LearnedRelativeAttention if "extent" in options else RelAttention)(WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in it.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return it.eval()


def hidden(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def run(it: Any, x: Tensor, memory: Tensor | None = None, **given: Any) -> Tensor:
    """Return the layer's result for hidden states [B, L, d_model] in either layout."""
    if it.batch_first:
        return it(x, memory, **given)
    return it(x.transpose(0, 1), None if memory is None else memory.transpose(0, 1), **given).transpose(0, 1)


def definition(it: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's result for x [B, S, d_model], and its weights [B, H, S, S]."""
    length, heads, kv = x.size(1), it.n_head * it.d_head, it.n_kv_head * it.d_head
    q, k, v = (
        y.unflatten(-1, (-1, it.d_head)).transpose(1, 2)
        for y in F.linear(x, it.qkv.weight, it.qkv.bias).split([heads, kv, kv], -1)
    )
    d = torch.arange(length)[:, None] - torch.arange(length)
    if isinstance(it, RelAttention):
        distances = d.flatten() if it.clamp_len is None else d.flatten().clamp(-it.clamp_len, it.clamp_len)
        table = (sinusoid(distances, WIDTH, torch.float64) @ it.r.weight.T).unflatten(-1, (it.n_head, -1))
        table = table.unflatten(0, d.shape)  # [S, S, H, D]
        position = it.d_head**-0.5 * torch.einsum("bhip,ijhp->bhij", q + it.position_bias[:, None], table)
        q = q + it.content_bias[:, None]
    else:
        if it.q_norm is not None:
            q, k = F.rms_norm(q, (it.d_head,), it.q_norm.weight), F.rms_norm(k, (it.d_head,), it.k_norm.weight)
        p = (x @ it.p.weight.T).unflatten(-1, (it.n_head, -1)).transpose(1, 2)
        row = d if it.causal else d + it.extent - 1
        inside = (row >= 0) & (row < len(it.table))
        position = torch.einsum("bhip,ijp->bhij", p, it.table[row.clamp(0, len(it.table) - 1)]) * inside
    k, v = (y.repeat_interleave(it.n_head // it.n_kv_head, 1) for y in (k, v))
    scale = it.d_head**-0.5 if it.scale is None else it.scale
    score = (scale * q @ k.mT + position).masked_fill(~_visible(it, d), -torch.inf)
    if getattr(it, "sink", None) is not None:
        score = torch.cat([score, it.sink[:, None, None].expand(len(x), -1, length, 1)], -1)
    weights = score.softmax(-1)[..., :length]
    return F.linear((weights @ v).transpose(1, 2).flatten(-2), it.out.weight, it.out.bias), weights


def _visible(it: Any, d: Tensor) -> Tensor:
    """Return which keys each query sees, of their distances d [S, S]."""
    left = it.window[0] if isinstance(it.window, tuple) else it.window and it.window - 1
    visible = torch.ones_like(d, dtype=torch.bool) if left is None else d <= left
    if it.causal:
        visible &= d >= 0
    if it.chunk is not None:
        chunk = torch.arange(len(d)) // it.chunk[0]
        apart = chunk[:, None] - chunk
        visible &= (apart >= 0) & (apart <= it.chunk[1])
    return visible


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "save": _saved,
}  # fmt: skip
