"""Inputs of GPU tests."""

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor]


def memory_beyond_31_bits(length: int, window: int) -> tuple[list[Tensor], Memory, Memory]:
    """Return bfloat16 (q, k, v, r, a bias), a memory of more than 2**31 elements, and its last
    1,000 rows, which hold what a window sees."""
    rows, width = 2**25 + 77, 64
    k_mem, v_mem = (torch.zeros(1, 1, rows, width, dtype=torch.bfloat16) for _ in range(2))
    assert k_mem.numel() > 2**31
    assert window <= 1000
    for x in (k_mem, v_mem):
        x[:, :, -1000:] = torch.randn(1, 1, 1000, width)
    q, k, v = torch.randn(3, 1, 1, length, width, dtype=torch.bfloat16)
    r, bias = torch.randn(1, window, width, dtype=torch.bfloat16), torch.randn(1, width, dtype=torch.bfloat16)
    return [q, k, v, r, bias], (k_mem, v_mem), (k_mem[:, :, -1000:].clone(), v_mem[:, :, -1000:].clone())
