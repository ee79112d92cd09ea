"""A preallocated key/value memory for evaluation and generation."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.checks import check_integer


class KeyValueCache:
    """The projected keys and values of the last `mem_len` positions of one attention layer, and its
    W_kR R.

    While parameters are frozen these do not change, so attention over the cache equals attention
    over the hidden states, without projecting the memory again for every segment. `append` writes
    in place. When the buffer is full, the positions held move to its front, at most once in
    `mem_len` positions. So memory and time for a position do not depend on the sequence's length.

    Attributes:
        r: [H, T, D], the projected encodings of distances from -zero_row.
        zero_row: the row of r that holds distance 0, which is the number of keys after its own that
            a query of a segment can see.
        window: the number of keys that a query sees, its own included, or (left, right), as in
            `rel_attention`; None for all.
        owner: the identity of the layer whose keys the cache holds: the layer that made it, else
            the first that used it; None before.
    """

    owner: object | None = None
    _begin: int  # offset of the first position held, in the buffer
    _end: int
    _total: int  # number of positions that were appended since `clear`
    _last_reset: int  # value of _total when a batch row was last reset
    _since: Tensor | None  # int64 [B]: _total where each row's sequence began; None if all rows see all positions

    def __init__(
        self,
        r: Tensor,
        batch: int,
        mem_len: int,
        max_segment: int,
        window: int | tuple[int | None, int | None] | None = None,
        zero_row: int = 0,
    ) -> None:
        """Allocate an empty cache, of r's dtype and device.

        Raises:
            TypeError, ValueError: a size is not an integer in range, or r has too few rows.
        """
        minimum = {"batch": 1, "mem_len": 0, "max_segment": 1, "zero_row": 0}
        for (name, low), value in zip(minimum.items(), (batch, mem_len, max_segment, zero_row), strict=True):
            check_integer(name, value, low, f">= {low}")
        rows = zero_row + mem_len + max_segment
        if r.dim() != 3 or r.size(1) < rows:
            raise ValueError(f"r must be [H, T >= zero_row + mem_len + max_segment = {rows}, D], got {list(r.shape)}")
        self.r = r
        self.zero_row = zero_row
        self.mem_len = mem_len
        self.max_segment = max_segment
        self.window = window
        shape = (2, batch, r.size(0), 2 * mem_len + max_segment, r.size(2))
        with torch.inference_mode(False):  # inference tensors could not be written to in another mode
            self._buffer = torch.zeros(shape, dtype=r.dtype, device=r.device)
        self.clear()

    @property
    def batch(self) -> int:
        return self._buffer.size(1)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"owner": None}  # a copied layer has another identity

    def __len__(self) -> int:
        """The number of positions held, at most mem_len."""
        return self._end - self._begin

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The pair (k_mem, v_mem), views [B, H, len(self), D] of the buffer."""
        held = self._buffer[:, :, :, self._begin : self._end]
        return held[0], held[1]

    @property
    def start(self) -> Tensor | None:
        """The first key of each batch row's present sequence, int32 [B, 1], as `rel_attention`
        takes it; None if all rows see all that is held."""
        if self._since is None:
            return None
        return (len(self) - (self._total - self._since)).clamp(min=0).to(torch.int32).unsqueeze(1)

    def __repr__(self) -> str:
        heads, _, width = self.r.shape
        mib = (self._buffer.nbytes + self.r.nbytes) / 2**20
        kind = f"{str(self.r.dtype).removeprefix('torch.')} on {self.r.device}"
        return (
            f"KeyValueCache({len(self)} of {self.mem_len} positions held, batch={self.batch}, heads={heads}, width={width}, "
            f"max_segment={self.max_segment}, window={self.window}, {kind}, {mib:.1f} MiB)"
        )

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Append a segment's keys and values [B, H, L, D], and drop the oldest beyond mem_len.

        Raises:
            ValueError: L is above max_segment, or another axis differs from the cache's.
        """
        expected = (self._buffer.size(1), self._buffer.size(2), k.size(2), self._buffer.size(4))
        if k.shape != expected or v.shape != expected or k.size(2) > self.max_segment:
            raise ValueError(
                f"k and v must be [{expected[0]}, {expected[1]}, L <= {self.max_segment}, {expected[3]}], got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        held, length = len(self), k.size(2)
        if self._end + length > self._buffer.size(3):  # then begin >= mem_len >= held: source and target do not overlap
            self._buffer[:, :, :, :held] = self._buffer[:, :, :, self._begin : self._end]
            self._begin, self._end = 0, held
        rows = slice(self._end, self._end + length)
        self._buffer[0, :, :, rows] = k
        self._buffer[1, :, :, rows] = v
        self._end += length
        self._begin = max(self._begin, self._end - self.mem_len)
        self._total += length
        if self._total - self._last_reset >= self.mem_len:  # nothing held is older than a reset
            self._since = None

    def reset(self, rows: Tensor | None = None) -> None:
        """Begin new sequences in some batch rows; the others continue.

        Queries of the reset rows no longer see the positions held. The device is not synchronized.

        rows: bool [B] on the cache's device, True where a sequence begins; None for all batch rows.

        Raises:
            TypeError, ValueError: rows has another type, dtype, shape or device.
        """
        if rows is None:
            self.clear()
            return
        self._check_rows(rows, torch.bool, "None or a bool tensor [B]")
        since = self._since
        if since is None:  # all rows see all that is held
            since = torch.full((self.batch,), self._total - len(self), dtype=torch.int64, device=rows.device)
        self._since = torch.where(rows, self._total, since)
        self._last_reset = max(self._total, self._last_reset)

    def hide(self, counts: Tensor) -> None:
        """Hide the first positions of each batch row, counted from the oldest position held.

        The hidden positions may be appended later, as padding on the left of a first segment is:
        that segment must then be at least as long as the padding. Synchronizes with the device.

        counts: int64 [B] on the cache's device, numbers of positions, >= 0.

        Raises:
            TypeError, ValueError: counts has another type, dtype, shape or device, or a negative
                value.
        """
        self._check_rows(counts, torch.int64, "an int64 tensor [B]", "counts")
        low, high = int(counts.min()), int(counts.max())
        if low < 0:
            raise ValueError(f"counts must be >= 0, got {low}")
        oldest = self._total - len(self)
        since = counts + oldest
        self._since = since if self._since is None else torch.maximum(since, self._since)
        self._last_reset = max(oldest + high, self._last_reset)

    @torch.no_grad()
    def reorder(self, rows: Tensor) -> None:
        """Replace batch row n by batch row rows[n], as beam search does.

        rows: int64 [B] on the cache's device, each from 0 to B - 1 (the range is not checked on a
        GPU).

        Raises:
            TypeError, ValueError: rows has another type, dtype, shape or device, or a value out of
                range.
        """
        self._check_rows(rows, torch.int64, "an int64 tensor [B]")
        if rows.device.type == "cpu" and (int(rows.min()) < 0 or int(rows.max()) >= self.batch):
            raise ValueError(f"rows must be from 0 to {self.batch - 1}, got {int(rows.min())} to {int(rows.max())}")
        held = slice(self._begin, self._end)
        self._buffer[:, :, :, held] = self._buffer[:, :, :, held].index_select(1, rows)
        if self._since is not None:
            self._since = self._since.index_select(0, rows)

    def _check_rows(self, rows: Tensor, dtype: torch.dtype, what: str, name: str = "rows") -> None:
        if not isinstance(rows, Tensor) or rows.dtype != dtype:
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{name} must be {what}, got {got}")
        if rows.shape != (self.batch,) or rows.device != self.r.device:
            raise ValueError(
                f"{name} must be [B] = [{self.batch}] on {self.r.device}, got shape {list(rows.shape)} on {rows.device}"
            )

    def clear(self) -> None:
        """Drop all positions held."""
        self._begin = self._end = self._total = self._last_reset = 0
        self._since = None
