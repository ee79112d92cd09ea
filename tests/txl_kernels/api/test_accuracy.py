"""How far kernels may be off: against float64 at most twice as far as the same algorithm in eager
PyTorch (2022, Dao); and with scores so large that float32 cannot hold their differences no weight
of backward is above 1, so that no gradient is beyond its bound, and on a CPU each query's weights
still sum to 1.
"""

import pytest
import torch
from error_budget import SHAPES, require_at_most_twice_eager
from oracle import Case

from txl_kernels import rel_attention
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
    most = 2 * values.abs().sum(-1).max()
    spread = 2 * (keys.norm(dim=-1).max() + r.norm(dim=-1).max())
    assert dq.norm(dim=-1).max() <= most * spread / 4 * max(1, dv.sum(2).max() / q.size(2))  # scale 1 / 4


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
