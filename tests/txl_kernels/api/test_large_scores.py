"""Scores so large that float32 cannot hold their differences: weights still sum to 1, forward and
backward alike, so that no gradient is beyond its bound.
"""

import pytest
import torch

from txl_kernels import rel_attention

LENGTHS = [1, 2, 3, 4, 5, 17, 70]
HOST = pytest.mark.parametrize("host", ["reference", "native"])  # on a CPU


def inputs(length: int, memory: int, size: float) -> list[torch.Tensor]:
    """q, k, v, r, biases, k_mem, v_mem with scores of about `size`."""
    torch.manual_seed(length)
    q = torch.randn(2, 2, length, 16)
    k, v = torch.randn(2, 2, 2, length, 16)
    k_mem, v_mem = torch.randn(2, 2, 2, memory, 16)
    r = torch.randn(2, memory + length, 16)
    u, w = torch.randn(2, 2, 16)
    return [x.requires_grad_() for x in (q * size, k, v, r, u, w, k_mem, v_mem)]


@HOST
@pytest.mark.parametrize("size", [1.0, 3e4, 1e7, 1e9])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("memory", [0, 90])
def test_weights_sum_to_one_in_backward(host: str, length: int, memory: int, size: float) -> None:
    q, k, v, r, u, w, k_mem, v_mem = tensors = inputs(length, memory, size)
    past = (k_mem, v_mem) if memory else None
    out = rel_attention(q, k, v, r, u, w, memory=past, backend=host)
    wanted = tensors if memory else tensors[:6]
    grads = torch.autograd.grad(out, wanted, torch.ones_like(out))
    assert all(g.isfinite().all() for g in grads)
    dv = torch.cat([grads[7], grads[2]], 2) if memory else grads[2]
    # With dout = 1 a value's gradient is the sum of its weights: each query's are 1 in all.
    torch.testing.assert_close(dv.sum(2), torch.full((2, 2, 16), float(length)), rtol=1e-4, atol=0)
    assert dv.max() <= length * 1.0001
    assert dv.min() >= 0
    # |dS| <= p |dP - delta|, so a query's gradient is at most that of one key against another.
    most = 2 * v.detach().abs().sum(-1).max().clamp(min=float(v_mem.detach().abs().sum(-1).max()) if memory else 0)
    keys = torch.cat([k_mem, k], 2) if memory else k
    spread = (keys.detach().norm(dim=-1).max() + r.detach().norm(dim=-1).max()) * 2
    assert grads[0].norm(dim=-1).max() <= most * spread / 4  # scale
