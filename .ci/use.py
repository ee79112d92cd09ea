"""One call of an installed package, forward and backward: use.py BACKEND."""

import ctypes
import platform
import sys
from pathlib import Path

import torch

import txl_kernels
from txl_kernels import onnx
from txl_kernels.backends import cpu

q, r, u = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(2, 5, 8), torch.zeros(2, 8)
txl_kernels.rel_attention(q, q, q, r, u, u, backend=sys.argv[1]).sum().backward()
assert q.grad is not None
assert q.grad.isfinite().all()
assert "site-packages" in txl_kernels.__file__, f"not the installed package: {txl_kernels.__file__}"
if sys.argv[1] == "native":
    # The operator for ONNX Runtime finds the library of kernels beside it.
    assert ctypes.CDLL(onnx.library()).RegisterCustomOps
if sys.argv[1] == "native" and (sys.platform, platform.machine()) == ("linux", "x86_64"):
    # A compiler that does not find the processor's features would make it run the slowest set.
    features = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    fastest = "avx512" if "avx512f" in features else "avx2" if {"avx2", "fma"} <= features else "baseline"
    chosen = cpu.module().isa()
    assert chosen == ("amx" if "amx_bf16" in features else fastest) or chosen == f"{fastest}_bf16", (chosen, fastest)
