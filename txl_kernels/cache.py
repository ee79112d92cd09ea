"""A preallocated key/value memory for evaluation and generation."""

import torch
from torch import Tensor

from txl_kernels.checks.settings import check_integer


class KeyValueCache:
    """The projected keys and values of the last `mem_len` positions of one attention layer, and its
    W_kR R.

    With frozen parameters these never change, so keeping them instead of hidden states is exact and
    saves projecting the memory again at every segment. Appending writes in place; when the buffer
    is full the rows held move to its front, once in at least `mem_len` positions, so memory and
    time a position stay constant however long the text.

    Attributes:
        r: [H, mem_len + max_segment, D], encodings of distances 0 and up.
        window: keys a position sees, its own included; None for all that are there.
    """

    def __init__(self, r: Tensor, batch: int, mem_len: int, max_segment: int, window: int | None = None) -> None:
        """Empty. Its dtype and device are r's."""
        for name, value, least in (("batch", batch, 1), ("mem_len", mem_len, 0), ("max_segment", max_segment, 1)):
            check_integer(name, value, least, f">= {least}")
        if r.dim() != 3 or r.size(1) < mem_len + max_segment:
            raise ValueError(
                f"r must be [H, T >= mem_len + max_segment = {mem_len + max_segment}, D], got {list(r.shape)}"
            )
        self.r = r
        self.mem_len = mem_len
        self.max_segment = max_segment
        self.window = window
        shape = (2, batch, r.size(0), 2 * mem_len + max_segment, r.size(2))
        self._buffer = r.new_zeros(shape)
        self._begin = self._end = 0

    @property
    def batch(self) -> int:
        return self._buffer.size(1)

    def __len__(self) -> int:
        """Positions held, at most mem_len."""
        return self._end - self._begin

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """(k_mem, v_mem), views [B, H, len(self), D] of the buffer."""
        held = self._buffer[:, :, :, self._begin : self._end]
        return held[0], held[1]

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds a segment's keys and values [B, H, L, D] and drops the oldest beyond mem_len.

        Raises:
            ValueError: L is above max_segment, or another axis differs from the cache's.
        """
        expected = (self._buffer.size(1), self._buffer.size(2), k.size(2), self._buffer.size(4))
        if k.shape != expected or v.shape != expected or k.size(2) > self.max_segment:
            raise ValueError(
                f"k and v must be [{expected[0]}, {expected[1]}, L <= {self.max_segment}, {expected[3]}], got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        length = k.size(2)
        if self._end + length > self._buffer.size(3):
            held = len(self)
            # Never overlaps: the buffer is full, so begin >= mem_len >= held.
            self._buffer[:, :, :, :held] = self._buffer[:, :, :, self._begin : self._end]
            self._begin, self._end = 0, held
        self._buffer[0, :, :, self._end : self._end + length] = k
        self._buffer[1, :, :, self._end : self._end + length] = v
        self._end += length
        self._begin = max(self._begin, self._end - self.mem_len)

    def clear(self) -> None:
        """Forgets everything held."""
        self._begin = self._end = 0
