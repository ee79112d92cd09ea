"""How far kernels may be off: against float64 at most twice as far as the same algorithm in eager
PyTorch (2022, Dao). Large scores: where rounding leaves them as they are, results and gradients are
those of an exact softmax; where float32 cannot hold their differences no weight of backward is
above 1, so that no gradient is beyond its bound, and on a CPU each query's weights still sum to 1.
"""

from typing import Any

import pytest
import torch
from cases import Case
from error_budget import SHAPES, require_at_most_twice_eager

from txl_kernels import rel_attention, rel_attention_weights
from txl_kernels.backends import triton
from txl_kernels.backends.triton import config

LENGTHS = [1, 2, 3, 4, 5, 17, 70]
SIZES = pytest.mark.parametrize("size", [1.0, 3e4, 1e7, 1e9])
SEGMENTS = pytest.mark.parametrize("length", LENGTHS)
MEMORIES = pytest.mark.parametrize("memory", [0, 90])


def inputs(length: int, memory: int, size: float) -> list[torch.Tensor]:
    """q, k, v, r, biases, k_mem, v_mem with scores of about `size`."""
    torch.manual_seed(length)
    q = torch.randn(2, 2, length, 16)
    k, v = torch.randn(2, 2, 2, length, 16)
    k_mem, v_mem = torch.randn(2, 2, 2, memory, 16)
    r = torch.randn(2, memory + length, 16)
    u, w = torch.randn(2, 2, 16)
    return [x.requires_grad_() for x in (q * size, k, v, r, u, w, k_mem, v_mem)]


def gradients(tensors: list[torch.Tensor], backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of q and of all values of the sum of out: a value's is the sum of its weights."""
    q, k, v, r, u, w, k_mem, v_mem = tensors
    past = (k_mem, v_mem) if k_mem.size(2) else None
    out = rel_attention(q, k, v, r, u, w, memory=past, backend=backend)
    grads = torch.autograd.grad(out, tensors if past else tensors[:6], torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads)
    return grads[0], torch.cat([grads[7], grads[2]], 2) if past else grads[2]


def assert_bounded(tensors: list[torch.Tensor], dq: torch.Tensor, dv: torch.Tensor) -> None:
    """As far as weights of at most 1 go."""
    q, k, v, r, _, _, k_mem, v_mem = (x.detach() for x in tensors)
    assert dv.min() >= 0
    assert dv.max() <= q.size(2) * 1.0001
    # |dS| <= p |dP - delta|, so a query's gradient is at most that of one key against another,
    # times the sum of its weights.
    values, keys = torch.cat([v_mem, v], 2), torch.cat([k_mem, k], 2)
    maximum = 2 * values.abs().sum(-1).max()
    spread = 2 * (keys.norm(dim=-1).max() + r.norm(dim=-1).max())
    assert dq.norm(dim=-1).max() <= maximum * spread / 4 * max(1, dv.sum(2).max() / q.size(2))  # scale 1 / 4


@pytest.mark.parametrize("size", [1e7, 1e9])
@pytest.mark.parametrize("length", [1, 4, 70])
@MEMORIES
def test_weights_are_at_most_one(backend: str, length: int, memory: int, size: float) -> None:
    tensors = inputs(length, memory, size)
    assert_bounded(tensors, *gradients(tensors, backend))


@pytest.mark.parametrize("length", [1, 4, 70])
def test_huge_terms_that_cancel(backend: str, length: int) -> None:
    """Scores of about 1 that are sums of 1e8 and -1e8, which every order of adding rounds anew."""
    q, k, _, r, u, w, k_mem, _ = tensors = inputs(length, 90, 1.0)
    with torch.no_grad():
        q[..., 0] = 1
        k[..., 0] = k_mem[..., 0] = 1e8
        r[..., 0] = -1e8
        u[:, 0] = w[:, 0] = 0
    assert_bounded(tensors, *gradients(tensors, backend))


@pytest.mark.parametrize("host", ["reference", "native"])  # on a GPU a weight is bounded, no more
@SIZES
@SEGMENTS
@MEMORIES
def test_weights_sum_to_one_in_backward(host: str, length: int, memory: int, size: float) -> None:
    _, dv = gradients(inputs(length, memory, size), host)
    torch.testing.assert_close(dv.sum(2), torch.full((2, 2, 16), float(length)), rtol=1e-4, atol=0)


def planted(length: int, memory: int, size: float, dtype: torch.dtype, spread: int) -> list[torch.Tensor]:
    """q, k, v, r, u, w, k_mem, v_mem in float64, whose scores, size less 0 to `spread` of the
    dtype's steps at size (or ones), are the same however they are summed in that dtype."""
    generator = torch.Generator().manual_seed(length)
    q, k = torch.zeros(1, 2, length, 4, dtype=torch.float64), torch.zeros(1, 2, memory + length, 4, dtype=torch.float64)
    step = max(1.0, abs(size) * torch.finfo(dtype).eps)
    q[..., 0] = 1
    k[..., 0] = size - torch.randint(0, spread + 1, k.shape[:3], generator=generator).double() * step
    k = k.to(dtype).double()
    v = torch.randn(k.shape, generator=generator, dtype=torch.float64).to(dtype).double()
    r, u = torch.zeros(2, memory + length, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    return [q, k[:, :, memory:], v[:, :, memory:], r, u, u, k[:, :, :memory], v[:, :, :memory]]


def exact(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of scores q . k alone, and the log of their sum relative to the largest."""
    length, keys = q.size(2), k.size(2)
    hidden = torch.arange(keys) > torch.arange(keys - length, keys).unsqueeze(1)
    score = (q @ k.mT).masked_fill(hidden, -torch.inf)
    return score.softmax(-1), (score - score.detach().amax(-1, keepdim=True)).exp().sum(-1).log()


def through_planted(
    tensors: list[torch.Tensor], dtype: torch.dtype, backend: str, **options: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A backend's out and gradients, through lse, too, beside the exact ones."""

    def run(dtype: torch.dtype, is_exact: bool) -> list[torch.Tensor]:
        q, k, v, r, u, w, k_mem, v_mem = (x.to(dtype).requires_grad_() for x in tensors)
        if is_exact:
            p, lse = exact(q, torch.cat([k_mem, k], 2))
            out = p @ torch.cat([v_mem, v], 2)
        else:
            out, lse = rel_attention(
                q, k, v, r, u, w, (k_mem, v_mem), scale=1.0, return_lse=True, backend=backend, **options
            )
        generator = torch.Generator().manual_seed(3)
        weights = (torch.randn(x.shape, generator=generator).to(x.dtype) / 64 for x in (out, lse))
        loss = sum((x * weight).sum() for x, weight in zip((out, lse), weights, strict=True))
        return [out, *torch.autograd.grad(loss, [k, v, k_mem, v_mem])]

    pairs = zip(run(dtype, False), run(torch.float64, True), strict=True)
    return dict(zip(("out", "dk", "dv", "dk_mem", "dv_mem"), pairs, strict=True))


PLANTED = [100.0, -3e4, 1e6, -1e9, 1e32, -2e38]


@pytest.mark.parametrize("size", PLANTED)
@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("length", [3, 40])
def test_softmax_of_large_scores(backend: str, length: int, spread: int, size: float) -> None:
    found = through_planted(planted(length, 90, size, torch.float32, spread), torch.float32, backend)
    for name, (got, want) in found.items():
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 6e4),
        (torch.float16, -100.0),
        (torch.float64, 1e9),
        (torch.float64, -1e17),
        (torch.float64, 1e300),
    ],
    ids=str,
)
def test_softmax_of_large_scores_in_other_dtypes(dtype: torch.dtype, size: float) -> None:
    tensors = planted(20, 30, size, dtype, 3)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-12
    for got, want in through_planted(tensors, dtype, "reference").values():
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    q, k, _, r, u, w, k_mem, _ = tensors
    p = rel_attention_weights(*(x.to(dtype) for x in (q, k, r, u, w, k_mem)), scale=1.0)
    want, _ = exact(q, torch.cat([k_mem, k], 2))
    torch.testing.assert_close(p.double(), want, rtol=0, atol=1e-6 if dtype == torch.float16 else 1e-12)


@pytest.mark.parametrize("size", [-1e9, 1e32])
@pytest.mark.parametrize("host", ["reference", "native"])
def test_parts_of_a_prefix_share_large_scores(host: str, size: float) -> None:
    """Of one key each, so that lse is the score itself."""
    tensors = planted(5, 3, size, torch.float32, 0)
    found = through_planted(tensors, torch.float32, host, prefix=1, window=1)
    v, v_mem = tensors[2], tensors[7]
    torch.testing.assert_close(found["out"][0].double(), (v + v_mem[:, :, :1]) / 2, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["dv"][0] * 2, through_planted(tensors, torch.float32, host, window=1)["dv"][0])


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("height", [13.0, 60.0])
def test_values_near_the_largest_number(backend: str, length: int, height: float) -> None:
    """Weighted sums are finite where as many values are; scores rise from key to key."""
    q, k, v, r, u, w, k_mem, v_mem = (x.float() for x in planted(length, 70, 0.0, torch.float32, 0))
    k[..., 0] = height
    k_mem[..., 0] = torch.linspace(0, height, 70)
    for value in (1e32, 3e36):
        v, v_mem = torch.full_like(v, value), torch.full_like(v_mem, value)
        out = rel_attention(q, k, v, r, u, w, (k_mem, v_mem), scale=1.0, backend=backend)
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_eager(
    case: Case, dtype: torch.dtype, kernel_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton.interpreted():
        # The interpreter spends its time by the tile, and truncates where a GPU rounds to bfloat16.
        monkeypatch.setattr(config, "choose", lambda *args: config.Config(64, 64, 4, 1))
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    require_at_most_twice_eager(case, dtype, kernel_backend)
