"""One call of an installed package, forward and backward: use.py BACKEND."""

import sys

import torch

import txl_kernels

q, r, u = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(2, 5, 8), torch.zeros(2, 8)
txl_kernels.rel_attention(q, q, q, r, u, u, backend=sys.argv[1]).sum().backward()
assert q.grad is not None
assert q.grad.isfinite().all()
assert "site-packages" in txl_kernels.__file__, f"not the installed package: {txl_kernels.__file__}"
