"""A cache for one step whose tensors stay where they are, so that it can be captured in a graph."""

import torch
from torch import Tensor

from txl_kernels.cache import KeyValueCache


class CacheFrame(KeyValueCache):
    """What a layer takes as its cache for steps of one position at the cache's present `place`.

    Its memory is the mem_len rows of the cache's buffer before that place, however many of them are
    held; those that are not are left out by `start`. So a step is the same calls on the same
    addresses each time the cache is at this place, and all that changes is in tensors. `append`
    writes but does not count: `KeyValueCache.advance` does.
    """

    def __init__(self, cache: KeyValueCache, start: Tensor | None) -> None:
        """start: int32 [B, 1], mem_len - len(cache) when a step runs; None for a full cache.

        Raises:
            ValueError: the place is before row mem_len or at the buffer's end; start is of another
                shape or dtype, or None though the cache is not full.
        """
        vars(self).update(vars(cache))
        if not self.mem_len <= self._end < self._buffer.size(3):
            raise ValueError(
                f"the cache's place must be from {self.mem_len} to {self._buffer.size(3) - 1}, got {self._end}"
            )
        if start is None and len(cache) < self.mem_len:
            raise ValueError(f"start must be given while the cache holds {len(cache)} of {self.mem_len} positions")
        if start is not None and (start.shape != (self.batch, 1) or start.dtype != torch.int32):
            raise ValueError(f"start must be int32 [B, 1] = [{self.batch}, 1], got {start.dtype} {list(start.shape)}")
        self._begin, self._first = self._end - self.mem_len, start

    @property
    def start(self) -> Tensor | None:
        return self._first

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Writes a position's keys and values [B, H, 1, D] at the place.

        Raises:
            ValueError: they are of another shape.
        """
        expected = (self.batch, self._buffer.size(2), 1, self._buffer.size(4))
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"k and v must be {list(expected)}, got {list(k.shape)} and {list(v.shape)}")
        self._write(k, v)
