"""A key/value memory whose shapes and addresses do not change, for CUDA graphs."""

from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from txl_kernels.cache import KeyValueCache
from txl_kernels.torch_state import is_recorded, versions

_caches: "WeakSet[StaticCache]" = WeakSet()


class StaticCache(KeyValueCache):
    """A cache of keys and values that can be read and written in a CUDA graph.

    It always holds mem_len positions; those not filled yet are hidden by `start`. There are two
    buffers: a step reads one and writes the other, the positions that remain and the new ones, by
    one copy of keys and one of values. So a graph of a step serves every second step, and two
    graphs serve all.

    The caches of a model's layers share `start`, which the caller must lower after each step of
    L positions, when all layers have read it: `start.sub_(L).clamp_(min=0)`. So it must do after
    `fill_cache`, when all layers are filled. Caches that share it have the same mem_len.

    Attributes:
        start: int32 [B, 1], the number of positions of each batch row that are hidden, the first
            ones: mem_len at the beginning of a sequence, 0 when the memory is full.
        turn: 0 or 1, the buffer that the next step reads. Call `after_capture` and `after_replay`
            where a step was captured in a graph, which runs nothing, or a graph was replayed, of
            which Python sees nothing.
    """

    start: Tensor = None  # type: ignore[assignment]  # a property of the base
    turn: int
    _filled: int  # number of positions that were appended since some were hidden last, by this object
    _not_lowered: tuple[int, ...]  # the version of start at an append after which it must be lowered, or ()

    def __init__(self, start: Tensor, r: Tensor | None, batch: int, mem_len: int, *others: Any, **options: Any) -> None:
        """Allocate an empty cache; start: int32 [B, 1]; the others as in `KeyValueCache`.

        Raises:
            TypeError, ValueError: start has another dtype or shape, or belongs to caches of another
                mem_len, or to caches that hold positions, which a new one does not; or another
                argument is wrong.
        """
        if not isinstance(start, Tensor) or start.dtype != torch.int32 or start.shape != (batch, 1):
            got = f"{start.dtype} {list(start.shape)}" if isinstance(start, Tensor) else type(start).__name__
            raise TypeError(f"start must be an int32 tensor [B, 1] = [{batch}, 1], got {got}")
        for other in [x for x in _caches if x.start is start]:
            if other.mem_len != mem_len:
                raise ValueError(
                    f"start must belong to caches of mem_len={mem_len} alone, got that of a cache of mem_len="
                    f"{other.mem_len}: the number of hidden positions is another; give these layers a tensor of their own"
                )
            if other.appended:
                raise ValueError(
                    f"start must belong to empty caches, got that of a cache to which {other.appended} positions were "
                    "appended: clear() all caches that share it, or give another tensor"
                )
        self.start = start
        super().__init__(r, batch, mem_len, *others, **options)
        if start.device != self.device:
            raise ValueError(f"start must be on the cache's device {self.device}, got {start.device}")
        _caches.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._not_lowered = ()  # a copied start has another version
        _caches.add(self)

    def _buffer(self, batch: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        return torch.zeros(2, batch, self.n_kv_head, self.mem_len, width, dtype=dtype, device=device)

    def __len__(self) -> int:
        """The number of positions held, those that are hidden included: mem_len."""
        return self.mem_len

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The pair (k_mem, v_mem), [B, Hkv, mem_len, d_key or d_value] each, hidden positions
        included.

        Raises:
            RuntimeError: an error interrupted an append, or `start` was not lowered after the last
                one.
        """
        self.check_whole()
        if self._not_lowered and self._not_lowered == versions((self.start,)):
            raise RuntimeError(
                "start must be lowered after each step, and after fill_cache, when all layers have read it, by "
                "start.sub_(L).clamp_(min=0): the positions that were appended last would stay hidden"
            )
        return self._keys[self.turn], self._values[self.turn]

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Append a segment's keys [B, Hkv, L, d_key] and values [B, Hkv, L, d_value], and drop the
        L oldest positions. `start` is not changed.

        Raises:
            TypeError: k or v is no tensor of a floating-point dtype.
            ValueError: L is above max_segment, or another axis differs from the cache's.
            RuntimeError: an error interrupted an append before; or the step is traced into a graph
                of another tool than CUDA graphs.
        """
        self.check_whole()
        if is_recorded():
            self._refuse_graph()
        self._check_segment(k, v)
        for buffer, new in ((self._keys, k), (self._values, v)):
            kept = buffer[self.turn][:, :, new.size(2) :]
            last = new[:, :, max(new.size(2) - self.mem_len, 0) :].to(buffer.dtype)
            torch.cat([kept, last], 2, out=buffer[1 - self.turn])
        is_filling = self._filled < self.mem_len and not torch.compiler.is_compiling()
        self._not_lowered = versions((self.start,)) if is_filling else ()
        self._advance(k.size(2), 1)

    def _advance(self, length: int, steps: int) -> None:
        self.turn = 1 - self.turn
        self._total += steps * length
        self._filled += steps * length
        self.appends += steps

    def after_replay(self, length: int) -> None:
        """Count the segment of `length` positions that a replayed graph appended. The graph, or its
        caller, has lowered `start`."""
        self._advance(length, 1)
        self._not_lowered = ()

    def after_capture(self, length: int) -> None:
        """Take the segment of `length` positions back whose append was captured, but not run."""
        self._advance(length, -1)
        self._not_lowered = ()

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
        self._filled = 0

    @torch.no_grad()
    def clear(self) -> None:
        """Hide all positions, in all caches that share `start`."""
        self._lost, self._total, self._filled, self._not_lowered, self.turn = False, 0, 0, (), 0
        self.start.fill_(self.mem_len)

    def hide(self, counts: Tensor) -> NoReturn:
        raise NotImplementedError("StaticCache has no hide; use a KeyValueCache")

    def reorder(self, rows: Tensor) -> NoReturn:
        raise NotImplementedError("StaticCache has no reorder; use a KeyValueCache")
