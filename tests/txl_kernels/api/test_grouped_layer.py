"""RelAttention with fewer heads of keys and values than of queries, against the layer whose
projection repeats them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from txl_kernels import KeyValueCache, RelAttention

B, L, M, WIDTH, HEADS, D = 2, 6, 5, 12, 4, 3
OPTIONS = [{}, {"window": 4}, {"causal": False}, {"clamp_len": 3}, {"batch_first": False}]


def pair(n_kv_head: int, **options: Any) -> tuple[RelAttention, RelAttention]:
    """A layer of n_kv_head heads of keys and values, and one with these heads repeated."""
    grouped, full = (
        RelAttention(WIDTH, HEADS, n_kv_head=n, dtype=torch.float64, **options).eval() for n in (n_kv_head, None)
    )
    for bias in grouped.biases():
        nn.init.normal_(bias)
    state = grouped.state_dict()
    full.load_state_dict({**state, "qkv.weight": repeated(state["qkv.weight"], n_kv_head)})
    return grouped, full


def repeated(weight: Tensor, n_kv_head: int) -> Tensor:
    """The rows of qkv for n_kv_head heads of keys and values, repeated for every head."""
    queries, *others = weight.split([HEADS * D, n_kv_head * D, n_kv_head * D])
    heads = (x.unflatten(0, (n_kv_head, D)).repeat_interleave(HEADS // n_kv_head, 0).flatten(0, 1) for x in others)
    return torch.cat([queries, *heads])


def hidden(length: int, like: RelAttention, batch: int = B) -> Tensor:
    return torch.randn((batch, length, WIDTH) if like.batch_first else (length, batch, WIDTH), dtype=torch.float64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_equals_repeated_projections(n_kv_head: int, options: dict[str, Any]) -> None:
    """Gradients, too: that of a shared head is the sum of its repetitions'."""
    grouped, full = pair(n_kv_head, **options)
    x, memory = hidden(L, grouped).requires_grad_(), hidden(M, grouped).requires_grad_()
    weight = hidden(L, grouped)
    found, want = (it(x, memory) for it in (grouped, full))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(grouped.weights(x, memory), full.weights(x, memory))
    got, whole = (
        dict(zip(names(it), torch.autograd.grad((y * weight).sum(), [x, memory, *it.parameters()]), strict=True))
        for it, y in ((grouped, found), (full, want))
    )
    queries, *others = whole.pop("qkv.weight").split(HEADS * D)
    summed = (y.unflatten(0, (n_kv_head, -1, D)).sum(1).flatten(0, 1) for y in others)
    torch.testing.assert_close(got.pop("qkv.weight"), torch.cat([queries, *summed]))
    torch.testing.assert_close(got, whole)


def names(it: RelAttention) -> list[str]:
    return ["x", "memory", *(name for name, _ in it.named_parameters())]


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"batch_first": False}], ids=str)
@torch.no_grad()
def test_a_cache_holds_the_shared_heads(options: dict[str, Any]) -> None:
    grouped, full = pair(2, **options)
    text = hidden(20, grouped)
    cache, axis = grouped.new_cache(B, 19, 7), 1 if grouped.batch_first else 0
    parts = [grouped(part, cache=cache) for part in text.split([7, 1, 1, 5, 6], axis)]
    torch.testing.assert_close(torch.cat(parts, axis), full(text))
    assert [x.shape for x in cache.memory] == [(B, 2, 19, D)] * 2
    filled = grouped.new_cache(B, 19, 7)
    grouped.fill_cache(filled, text)
    torch.testing.assert_close(filled.memory, cache.memory)
    with pytest.raises(ValueError, match=r"cache must be this layer's, with .* \(4, 3, 3\), got one with \(2, 3, 3\)"):
        full(hidden(2, full), cache=grouped.new_cache(B, 19, 7))


@pytest.mark.parametrize("options", [{}, {"causal": False, "chunk": (4, 2)}], ids=str)
@torch.no_grad()
def test_a_cache_without_a_table_has_it_computed(options: dict[str, Any]) -> None:
    grouped, full = pair(2, **options)
    text = hidden(16, grouped)
    cache = KeyValueCache(None, B, 8 if options else 15, 4, n_kv_head=2, d_key=D, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([grouped(part, cache=cache) for part in text.split(4, 1)], 1), full(text))
