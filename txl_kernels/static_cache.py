"""A key/value memory whose shapes and addresses do not change, for CUDA graphs."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from txl_kernels.cache import KeyValueCache


class StaticCache(KeyValueCache):
    """A cache of keys and values that can be read and written in a CUDA graph.

    It always holds mem_len positions; those not filled yet are hidden by `start`. There are two
    buffers: a step reads one and writes the other, the positions that remain and the new ones, by
    one copy of keys and one of values. So a graph of a step serves every second step, and two
    graphs serve all.

    The caches of a model's layers share `start`, which the caller must lower after each step of
    L positions, when all layers have read it: `start.sub_(L).clamp_(min=0)`.

    Attributes:
        start: int32 [B, 1], the number of positions of each batch row that are hidden, the first
            ones: mem_len at the beginning of a sequence, 0 when the memory is full.
        turn: 0 or 1, the buffer that the next step reads. A replayed graph does not change it:
            set it to `1 - turn` after each replay.
    """

    start: Tensor = None  # type: ignore[assignment]  # a property of the base
    turn: int

    def __init__(self, start: Tensor, r: Tensor | None, batch: int, mem_len: int, *others: Any, **options: Any) -> None:
        """Allocate an empty cache; start: int32 [B, 1]; the others as in `KeyValueCache`.

        Raises:
            TypeError, ValueError: start has another dtype or shape, or another argument is wrong.
        """
        if not isinstance(start, Tensor) or start.dtype != torch.int32 or start.shape != (batch, 1):
            got = f"{start.dtype} {list(start.shape)}" if isinstance(start, Tensor) else type(start).__name__
            raise TypeError(f"start must be an int32 tensor [B, 1] = [{batch}, 1], got {got}")
        self.start, self.turn = start, 0
        super().__init__(r, batch, mem_len, *others, **options)
        if start.device != self.device:
            raise ValueError(f"start must be on the cache's device {self.device}, got {start.device}")

    def _buffer(self, batch: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        return torch.zeros(2, batch, self.n_kv_head, self.mem_len, width, dtype=dtype, device=device)

    @property
    def batch(self) -> int:
        return self._keys.size(1)

    def __len__(self) -> int:
        """The number of positions held, those that are hidden included: mem_len."""
        return self.mem_len

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The pair (k_mem, v_mem), [B, Hkv, mem_len, d_key or d_value] each, hidden positions
        included.

        Raises:
            RuntimeError: an error interrupted an append.
        """
        self.check_whole()
        return self._keys[self.turn], self._values[self.turn]

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Append a segment's keys [B, Hkv, L, d_key] and values [B, Hkv, L, d_value], and drop the
        L oldest positions. `start` is not changed.

        Raises:
            TypeError: k or v is no tensor of a floating-point dtype.
            ValueError: L is above max_segment, or another axis differs from the cache's.
            RuntimeError: an error interrupted an append before.
        """
        self.check_whole()
        self._check_segment(k, v)
        for buffer, new in ((self._keys, k), (self._values, v)):
            kept = buffer[self.turn][:, :, new.size(2) :]
            last = new[:, :, max(new.size(2) - self.mem_len, 0) :].to(buffer.dtype)
            torch.cat([kept, last], 2, out=buffer[1 - self.turn])
        self.turn = 1 - self.turn
        self._total += k.size(2)
        self.appends += 1

    def take_back(self, appends: int) -> None:
        """Mark the cache as not whole if there were appends: `start`, which the caller lowers, is
        not known to belong to either buffer. Until it is cleared, it raises RuntimeError."""
        self._lost = self._lost or appends > 0

    @torch.no_grad()
    def reset(self, rows: Tensor | None = None) -> None:
        """Begin new sequences in some batch rows, in all caches that share `start`; rows: as in
        `KeyValueCache.reset`."""
        if rows is None:
            self.clear()
            return
        self._check_rows(rows, torch.bool, "None or a bool tensor [B]")
        self.start.masked_fill_(rows.unsqueeze(1), self.mem_len)

    @torch.no_grad()
    def clear(self) -> None:
        """Hide all positions, in all caches that share `start`."""
        self._lost, self._total = False, 0
        self.start.fill_(self.mem_len)

    def hide(self, counts: Tensor) -> NoReturn:
        raise NotImplementedError("StaticCache has no hide; use a KeyValueCache")

    def reorder(self, rows: Tensor) -> NoReturn:
        raise NotImplementedError("StaticCache has no reorder; use a KeyValueCache")
