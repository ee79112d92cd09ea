"""Dropout bits: Philox-4x32-10 (Salmon et al. 2011), a function of seed and (b, h, i, j) alone.

Entry (b, h, i, j) takes word i % 4 of the block with counter (j, i // 4, b * H + h, 0) under
the 64-bit key `seed`, and is dropped if that word is below round(p * 2**32). Every backend draws
these same bits. Four neighbouring queries share a block because blocks of queries start at
multiples of four, while tiles of keys start where the memory's length puts them.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def drop_threshold(dropout_p: float) -> int:
    """Words below this are dropped: p as a fraction of 2**32, at most 2**32 - 1."""
    return min(round(dropout_p * 2**32), _MASK)


def new_seed(device: torch.device) -> Tensor:
    """int64 [1], drawn from torch's generator of the device."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def _high_low(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # 32 x 32 -> 64 bits in int64, which would overflow: split x into 16-bit halves.
    low, high = (x & 0xFFFF) * multiplier, (x >> 16) * multiplier
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words for each counter; everything int64 holding 32-bit values, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(c0, _MULTIPLIERS[0])
        high1, low1 = _high_low(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, batch: int, heads: int, length: int, keys: int, dropout_p: float) -> Tensor:
    """Which entries stay: bool [batch, heads, length, keys]. seed: int64, one element."""
    device = seed.device
    bh = torch.arange(batch * heads, device=device).view(-1, 1, 1)
    group = torch.arange((length + 3) // 4, device=device).view(1, -1, 1)
    j = torch.arange(keys, device=device).view(1, 1, -1)
    seed = seed.reshape(())
    words = philox((j, group, bh, torch.zeros_like(j)), (seed & _MASK, (seed >> 32) & _MASK))
    bits = torch.stack(torch.broadcast_tensors(*words), dim=2).flatten(1, 2)[:, :length]
    return (bits >= drop_threshold(dropout_p)).view(batch, heads, length, keys)
