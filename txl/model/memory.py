"""The memory of a model: hidden states of the positions before a segment (paper, section 3.2)."""

import torch
from torch import Tensor

# The hidden states each layer read last, n_layer of [B, M, d_model], M <= mem_len. Detached.
HiddenMemory = tuple[Tensor, ...]


def remember(past: Tensor | None, hidden: Tensor, mem_len: int, ext_len: int = 0) -> Tensor:
    """The last mem_len states [B, M, d_model] of memory and segment, detached (h tilde), in the
    dtype of `past`.

    ext_len: states at the segment's end to leave out: the next segment begins with these positions
        and computes them anew. (The released code swaps two lengths here and keeps some twice.)
    """
    new = hidden[:, : max(hidden.size(1) - ext_len, 0)].detach()
    if past is None or new.size(1) >= mem_len:
        return new[:, max(new.size(1) - mem_len, 0) :]
    keep = min(past.size(1), mem_len - new.size(1))
    return torch.cat([past[:, past.size(1) - keep :], new.to(past.dtype)], 1)
