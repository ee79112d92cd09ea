"""Texts packed in a row against each on its own."""

import itertools
from typing import Any

import pytest
import torch

from txl_kernels import RelAttention, bounds_from_cu_seqlens

LENGTHS = (7, 1, 0, 12, 5)
TOTAL = sum(LENGTHS)
ENDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [0, 3])
def test_each_position_sees_its_own_text(dtype: torch.dtype, padding: int) -> None:
    start, end = bounds_from_cu_seqlens(ENDS.to(dtype), TOTAL + padding)
    assert start.dtype == end.dtype == torch.int32
    want = [(int(a), int(b)) for a, b in itertools.pairwise(ENDS) for _ in range(a, b)] + [(0, 0)] * padding
    assert list(zip(start[0].tolist(), end[0].tolist(), strict=True)) == want


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window": 4}, {"causal": False, "batch_first": False}], ids=str
)
def test_a_layer_gives_what_each_sequence_gives(options: dict[str, Any]) -> None:
    layer = RelAttention(16, 2, dtype=torch.float64, **options)
    for bias in layer.biases():
        torch.nn.init.normal_(bias)
    x = torch.randn(1, TOTAL, 16, dtype=torch.float64, requires_grad=True)
    if not layer.batch_first:
        x = x.detach().transpose(0, 1).requires_grad_()
    axis = 1 if layer.batch_first else 0
    weight = torch.randn_like(x)
    packed = layer(x, cu_seqlens=ENDS)
    alone = torch.cat([layer(part) for part in x.split(LENGTHS, axis)], axis)
    torch.testing.assert_close(packed, alone)
    leaves = [x, *layer.parameters()]
    got, want = (torch.autograd.grad((y * weight).sum(), leaves, retain_graph=True) for y in (packed, alone))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_layer() -> None:
    torch.compiler.reset()
    layer, x = RelAttention(16, 2), torch.randn(1, TOTAL, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cu_seqlens=ENDS), layer(x, cu_seqlens=ENDS))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory": torch.zeros(1, 3, 16)}, "memory must be None with cu_seqlens"),
        ({"start": torch.zeros(1, TOTAL, dtype=torch.int32)}, "start must be None with cu_seqlens"),
        ({"end": torch.zeros(1, TOTAL, dtype=torch.int32)}, "end must be None with cu_seqlens"),
        ({"cache": "own"}, "cache must be None with cu_seqlens"),
        ({"x": torch.zeros(2, TOTAL, 16)}, r"x must be one row \(B = 1\) with cu_seqlens"),
        ({"cu_seqlens": ENDS.to("meta")}, "cu_seqlens must be on x's device cpu, got meta"),
        ({"cu_seqlens": torch.tensor([0, TOTAL + 1])}, f"at most total={TOTAL}, got 0 to {TOTAL + 1}"),
        ({"cu_seqlens": torch.tensor([1, TOTAL])}, f"must rise from 0 .*, got 1 to {TOTAL}"),
        ({"cu_seqlens": torch.tensor([0, 9, 5])}, "must rise from 0 .*, with a step down"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens must be \[sequences \+ 1\], got shape \[0\]"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
@torch.no_grad()
def test_refused(changed: dict[str, Any], message: str) -> None:
    layer = RelAttention(16, 2).eval()
    if changed.get("cache") == "own":
        changed = {"cache": layer.new_cache(1, 4, TOTAL)}
    given = {"x": torch.zeros(1, TOTAL, 16), "cu_seqlens": ENDS} | changed
    with pytest.raises(ValueError, match=message):
        layer(**given)


def test_refused_by_type() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens must be an int32 or int64 tensor .*, got list"):
        bounds_from_cu_seqlens([0, 3], 3)
    chunked = RelAttention(16, 2, causal=False, chunk=(2, 1))
    with pytest.raises(ValueError, match="chunk must be None with cu_seqlens"):
        chunked(torch.zeros(1, TOTAL, 16), cu_seqlens=ENDS)
