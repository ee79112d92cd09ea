"""Relative biases: T5's buckets and ALiBi's slopes against their definitions."""

import math
from typing import Any

import pytest
import torch

from txl_kernels import alibi_slopes, rel_attention, t5_buckets


def test_t5_buckets_of_every_distance() -> None:
    """32 buckets as in T5's encoder: 8 distances each way of their own, then ever more to 128."""
    table = torch.arange(32.0).unsqueeze(1)
    distances = torch.arange(-300, 301)
    bucket = t5_buckets(table, distances)[0].long()
    for d, b in zip(distances.tolist(), bucket.tolist(), strict=True):
        side = 16 if d < 0 else 0
        if abs(d) < 8:
            assert b == side + abs(d)
        else:
            exact = 8 + math.log(abs(d) / 8) / math.log(16) * 8
            assert b - side == min(math.floor(exact + 1e-6), 15)
    causal = t5_buckets(table, distances, bidirectional=False)[0]
    assert torch.equal(causal[distances <= 0], torch.zeros(301))
    assert causal[distances == 15] == 15
    assert causal[distances == 300] == 31


def test_alibi_slopes_of_the_paper() -> None:
    """Section 3: for 8 heads 1/2, 1/4, .., 1/256; for 16 those, and the geometric means between."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    torch.testing.assert_close(alibi_slopes(16)[1::2].double(), torch.tensor(eight, dtype=torch.float64))
    twelve = alibi_slopes(12, dtype=torch.float64)
    assert twelve[:8].tolist() == eight
    torch.testing.assert_close(twelve[8:], torch.tensor([2 ** (-0.5 - i) for i in range(4)], dtype=torch.float64))
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_attention_with_relative_biases() -> None:
    """The results of scaled_dot_product_attention with dense biases, and their gradients."""
    H, L, D = 3, 37, 16
    q, k, v = (torch.randn(2, H, L, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(8, H, dtype=torch.float64, requires_grad=True)
    distances, apart = torch.arange(1 - L, L), torch.arange(L)[:, None] - torch.arange(L)
    alibi = -alibi_slopes(H, dtype=torch.float64)[:, None] * distances.abs()
    for bias, leaves in ((t5_buckets(table, distances, max_distance=20), [q, k, v, table]), (alibi, [q, k, v])):
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias[:, apart + L - 1], scale=1.0)
        got = rel_attention(q, k, v, None, r_bias=bias, causal=False, zero_row=L - 1, scale=1.0)
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (got, want)]
        torch.testing.assert_close(*gradients)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: t5_buckets([1.0], torch.arange(3)), TypeError, "table must be .*, got list"),
    (lambda: t5_buckets(torch.zeros(8), torch.arange(3)), TypeError, r"table must be .*, got torch.float32 \[8\]"),
    (lambda: t5_buckets(torch.zeros(8, 2), torch.zeros(3)), TypeError, "distances must be .*, got torch.float32"),
    (lambda: t5_buckets(torch.zeros(8, 2), torch.arange(3), bidirectional=1), TypeError, "bidirectional must be"),
    (lambda: t5_buckets(torch.zeros(3, 2), torch.arange(3)), ValueError, r"at least 4 buckets, got shape \[3, 2\]"),
    (
        lambda: t5_buckets(torch.zeros(8, 2), torch.arange(3), max_distance=2),
        ValueError,
        "max_distance must be .*got 2",
    ),
    (lambda: alibi_slopes(0), ValueError, "n_head must be an integer >= 1, got 0"),
    (lambda: alibi_slopes(2.0), TypeError, "n_head must be an integer >= 1, got float"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
