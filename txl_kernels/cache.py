"""A preallocated key/value memory for evaluation and generation."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels.checks import check_integer


class KeyValueCache:
    """The projected keys and values of the last `mem_len` positions of one attention layer, and its
    W_kR R.

    With frozen parameters these never change, so keeping them instead of hidden states is exact and
    saves projecting the memory again at every segment. Appending writes in place; when the buffer
    is full the rows held move to its front, once in at least `mem_len` positions, so memory and
    time a position stay constant however long the sequence.

    Attributes:
        r: [H, T, D], encodings of distances -zero_row and up.
        zero_row: row of r that holds distance 0: how far ahead a segment sees itself.
        window: keys a position sees, its own included; None for all that are there.
        owner: the identity of the one layer whose keys it holds: the one that made it, else the
            first to use it; None before.
    """

    owner: object | None = None
    _begin: int  # of what is held, in the buffer
    _end: int
    _total: int  # positions ever added
    _last_reset: int  # and when a row was last reset
    _since: Tensor | None  # int64 [B]: positions added before each row's sequence; None where all that is held counts

    def __init__(
        self,
        r: Tensor,
        batch: int,
        mem_len: int,
        max_segment: int,
        window: int | tuple[int | None, int | None] | None = None,
        zero_row: int = 0,
    ) -> None:
        """Empty. Its dtype and device are r's."""
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
        with torch.inference_mode(False):  # written to in either mode
            self._buffer = torch.zeros(shape, dtype=r.dtype, device=r.device)
        self.clear()

    @property
    def batch(self) -> int:
        return self._buffer.size(1)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"owner": None}  # a copied layer has an identity of its own

    def __len__(self) -> int:
        """Positions held, at most mem_len."""
        return self._end - self._begin

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """(k_mem, v_mem), views [B, H, len(self), D] of the buffer."""
        held = self._buffer[:, :, :, self._begin : self._end]
        return held[0], held[1]

    @property
    def start(self) -> Tensor | None:
        """First key of each row's own sequence, int32 [B, 1], for `rel_attention`; None where all
        that is held counts."""
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
        held, length = len(self), k.size(2)
        if self._end + length > self._buffer.size(3):  # so begin >= mem_len >= held: the copy never overlaps
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
        """Begin new sequences in some rows of the batch; the others go on.

        What those rows held is no longer seen. Does not wait for the device.

        rows: bool [B] on the cache's device, True where a sequence begins; None for all rows.

        Raises:
            TypeError, ValueError: rows is something else.
        """
        if rows is None:
            self.clear()
            return
        self._check_rows(rows, torch.bool, "None or a bool tensor [B]")
        since = self._since
        if since is None:  # of all rows, what is held counts
            since = torch.full((self.batch,), self._total - len(self), dtype=torch.int64, device=rows.device)
        self._since = torch.where(rows, self._total, since)
        self._last_reset = max(self._total, self._last_reset)

    def hide(self, counts: Tensor) -> None:
        """Leaves out each row's first positions, counted from the oldest that is held; they may be
        still to come, as the padding before a sequence is.

        Until they are there, a segment must reach at least as far. Waits for the device.

        counts: int64 [B] on the cache's device, positions >= 0.

        Raises:
            TypeError, ValueError: counts is something else.
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
        """Row n becomes what row rows[n] was, as beam search needs it.

        rows: int64 [B] on the cache's device, each from 0 to B - 1 (not looked at on a GPU).

        Raises:
            TypeError, ValueError: rows is something else.
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
        """Forgets everything held."""
        self._begin = self._end = self._total = self._last_reset = 0
        self._since = None
