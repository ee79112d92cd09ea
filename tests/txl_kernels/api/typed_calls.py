"""A user's calls, for type checkers: mypy reads this file with the package (`make lint`). In strict
mode it also reports an ignore without an error, so that each ignored line must be one."""

from typing import assert_type

import torch
from torch import Tensor

from txl_kernels import (
    Chunk,
    KeyValuePair,
    LearnedRelativeAttention,
    Outside,
    RelAttention,
    StaticCache,
    Window,
    rel_attention,
    rel_attention_weights,
)


def attend(
    q: Tensor, r: Tensor, memory: KeyValuePair | None, window: Window, chunk: Chunk, outside: Outside, return_lse: bool
) -> Tensor:
    found = rel_attention(q, q, q, r, memory=memory, window=window, chunk=chunk, outside=outside, return_lse=return_lse)
    assert_type(found, Tensor | tuple[Tensor, Tensor])
    assert_type(rel_attention(q, q, q, r, memory=memory), Tensor)
    assert_type(rel_attention(q, q, q, r, return_lse=True), tuple[Tensor, Tensor])
    assert_type(rel_attention_weights(q, q, r, memory=memory), Tensor)
    rel_attention(q, q, q, r, windw=3)  # type: ignore[call-overload]
    rel_attention_weights(q, q, r, windw=3)  # type: ignore[arg-type]
    return found[0] if isinstance(found, tuple) else found


def run(layer: RelAttention | LearnedRelativeAttention, x: Tensor, start: Tensor) -> Tensor:
    cache = layer.new_cache(2, start=start)
    assert isinstance(cache, StaticCache)
    assert_type(layer(x, cache=cache), Tensor)
    layer(x, memry=x)  # type: ignore[arg-type]
    layer.forward(x, memry=x)  # type: ignore[arg-type]
    layer(x, x, x)  # type: ignore[arg-type]
    return layer(x, memory=x)


RelAttention(64, 4, bias=True, window=(8, 8), device=torch.device("cpu"))
RelAttention(64, 4, widow=8)  # type: ignore[arg-type]
LearnedRelativeAttention(64, 4, extent=8, embed_dim=64)  # type: ignore[arg-type]
