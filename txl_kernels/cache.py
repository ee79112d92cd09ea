"""A preallocated key/value memory for evaluation and generation."""

import copy
import ctypes
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from txl_kernels.checks import Window, check_integer, span
from txl_kernels.torch_state import is_recorded


class Owner:
    """The identity of an attention layer, which its caches record. Copies of a layer have others.

    layer: the layer, of which a weak reference is kept; None if it is not known.
    """

    def __init__(self, layer: nn.Module | None = None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)

    def __reduce__(self) -> Any:
        return Owner, ()

    def digest(self) -> str:
        """Return a digest of the layer's parameters and of its class, by which a copied cache is
        recognised; "" if the layer does not exist any more, or its parameters are elsewhere."""
        layer = None if self._layer is None else self._layer()
        if layer is None:
            return ""
        digest = hashlib.sha256(repr((type(layer).__qualname__, getattr(layer, "clamp_len", None))).encode())
        try:
            for name, x in layer.state_dict().items():
                digest.update(name.encode())
                for part in _plain_tensors(x):
                    digest.update(content(part))
        except (RuntimeError, TypeError, NotImplementedError):  # on "meta", or a fake tensor
            return ""
        return digest.hexdigest()


def content(x: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, without NumPy, which torch may lack.

    Raises:
        RuntimeError, NotImplementedError: the tensor has no storage.
    """
    x = x.detach().cpu().contiguous()
    if x.nbytes and not x.data_ptr():
        raise RuntimeError(f"a tensor {list(x.shape)} without storage")
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _plain_tensors(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor consists of: itself, or the parts of a subclass (quantized or
    sharded tensors)."""
    names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else None
    if names is None:
        yield x
    for name in names or ():
        yield from _plain_tensors(getattr(x, name))


@contextmanager
def unchanged_on_error(caches: Sequence["KeyValueCache"]) -> Iterator[None]:
    """A context that takes an append to each cache back if its body raises. Caches that were
    appended to several times cannot be restored; they raise RuntimeError until they are cleared."""
    before = [cache.appends for cache in caches]
    try:
        yield
    except BaseException:
        for cache, appends in zip(caches, before, strict=True):
            cache.take_back(cache.appends - appends)
        raise


class KeyValueCache:
    """The projected keys and values of the last `mem_len` positions of one attention layer, and its
    table r, if it has one: W_kR R, or learned rows.

    While parameters are frozen these do not change, so attention over the cache equals attention
    over the hidden states, without projecting the memory again for every segment. `append` writes
    in place. When the buffers are full, the positions held move to their front, at most once in
    `mem_len` positions. So memory and time for a position do not depend on the sequence's length.

    Attributes:
        r: [H, T, Dp] or [1, T, Dp], the rows of distances from -zero_row; or None.
        zero_row: the row of r that holds distance 0, which is the number of keys after its own that
            a query of a segment can see.
        window: the number of keys that a query sees, its own included, or (left, right), as in
            `rel_attention`; None for all.
        n_kv_head, d_key, d_value: the number of heads of keys and values, and their widths.
        owner: the identity of the layer whose keys the cache holds: the layer that made it, else
            the first that used it; None before. A copy of a cache belongs to the first layer that
            uses it and has the parameters of the owner; until then `owner` is their digest.
        appends: the number of appends.
        checked: the call (its layer, shape, dtype and device) for which a layer has checked the
            cache; None before.
    """

    owner: Owner | str | None = None
    checked: Any = None
    made_of: Any = None  # `_table_state` of the layer that computed r, at that time; None for a table of the caller's
    appends: int = 0
    _lost: bool = False  # whether positions are missing, after an error
    _before: tuple[Any, ...] | None = None  # the fields below, before the last append
    _begin: int  # offset of the first position held, in the buffers
    _end: int
    _total: int  # number of positions that were appended since `clear`
    _last_reset: int  # value of _total when a batch row was last reset
    _since: Tensor | None  # int64 [B]: _total where each row's sequence began; None if all rows see all positions

    def __init__(
        self,
        r: Tensor | None,
        batch: int,
        mem_len: int,
        max_segment: int,
        window: Window = None,
        zero_row: int = 0,
        *,
        n_kv_head: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate an empty cache.

        Args:
            r: [H, T, Dp], or [1, T, Dp] for all heads, or None: the table that `rel_attention` will
                read beside the keys. It is kept, not copied.
            batch: B.
            mem_len, max_segment: positions that the cache holds, and the largest segment.
            window, zero_row: as in `rel_attention`. r must have a row for every distance in the
                cache, zero_row + mem_len + max_segment rows.
            n_kv_head, d_key, d_value: the number of heads of keys and values, and their widths.
                None for those of r, as in Transformer-XL, where keys and rows of r have the same
                heads and width, and values have d_key. Needed where r is None.
            dtype, device: those of keys and values; None for r's, without r torch's defaults.

        Raises:
            TypeError, ValueError: a size is not an integer in range or is needed, or r is not such
                a table, or has too few rows.
        """
        minimum = {"batch": 1, "mem_len": 0, "max_segment": 1, "zero_row": 0}
        for (name, low), value in zip(minimum.items(), (batch, mem_len, max_segment, zero_row), strict=True):
            check_integer(name, value, low, f"an integer >= {low}")
        if r is not None:
            if not isinstance(r, Tensor):
                raise TypeError(f"r must be None or a torch.Tensor, got {type(r).__name__}")
            rows = zero_row + mem_len + max_segment
            if r.dim() != 3 or r.size(1) < rows:
                raise ValueError(
                    f"r must be [H or 1, T >= zero_row + mem_len + max_segment = {rows}, Dp], got {list(r.shape)}"
                )
            n_kv_head = r.size(0) if n_kv_head is None else n_kv_head
            d_key = r.size(2) if d_key is None else d_key
            dtype = r.dtype if dtype is None else dtype
            device = r.device if device is None else device
        sizes: dict[str, Any] = {
            "n_kv_head": n_kv_head,
            "d_key": d_key,
            "d_value": d_key if d_value is None else d_value,
        }
        for name, size in sizes.items():
            check_integer(name, size, 1, "an integer >= 1" + ("" if r is not None else " where r is None"))
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype, got {dtype}")
        span(True, window)  # checks the window
        self.r = r
        self.zero_row = zero_row
        self.mem_len = mem_len
        self.max_segment = max_segment
        self.window = window
        self.n_kv_head, self.d_key, self.d_value = sizes.values()
        with torch.inference_mode(False):  # inference tensors could not be written to in another mode
            self._keys = self._buffer(batch, self.d_key, dtype, device)
            self._values = self._buffer(batch, self.d_value, dtype, device)
        self.clear()

    def _buffer(self, batch: int, width: int, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        """Allocate the zeroed buffer of keys, or of values, whose rows have a width."""
        positions = 2 * self.mem_len + self.max_segment
        return torch.zeros(batch, self.n_kv_head, positions, width, dtype=dtype, device=device)

    @property
    def appended(self) -> int:
        """The number of positions that were appended since the cache was made or cleared."""
        return self._total

    @property
    def batch(self) -> int:
        return self._keys.size(-4)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._keys.dtype

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self._keys.device

    @property
    def nbytes(self) -> int:
        """The number of bytes of the buffers and of r."""
        return self._keys.nbytes + self._values.nbytes + (0 if self.r is None else self.r.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        owner = self.owner.digest() if isinstance(self.owner, Owner) else self.owner
        made_of = None if self.made_of is None else ((), ())  # a copied layer's parameters are others
        return vars(self) | {"owner": owner, "checked": None, "made_of": made_of}

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeyValueCache":
        copied = memo[id(self)] = type(self).__new__(type(self))
        with torch.inference_mode(False):  # a copied inference tensor could not be written to in another mode
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with torch.inference_mode(False):  # of buffers that inference mode copied
            self._keys, self._values = (x.clone() if x.is_inference() else x for x in (self._keys, self._values))

    def __len__(self) -> int:
        """The number of positions held, at most mem_len."""
        return self._end - self._begin

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The pair (k_mem, v_mem), views [B, Hkv, len(self), d_key or d_value] of the buffers.

        Raises:
            RuntimeError: an error interrupted several appends.
        """
        if self._lost:
            self.check_whole()
        held = slice(self._begin, self._end)
        return self._keys[:, :, held], self._values[:, :, held]

    @property
    def start(self) -> Tensor | None:
        """The first key of each batch row's present sequence, int32 [B, 1], as `rel_attention`
        takes it; None if all rows see all that is held."""
        if self._since is None:
            return None
        return (len(self) - (self._total - self._since)).clamp(min=0).to(torch.int32).unsqueeze(1)

    def __repr__(self) -> str:
        width = f"{self.d_key}" if self.d_key == self.d_value else f"{self.d_key} and {self.d_value}"
        kind = f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        held = f"{len(self)} of {self.mem_len} positions held"
        return (
            f"{type(self).__name__}({held}, batch={self.batch}, heads={self.n_kv_head}, "
            f"width={width}, max_segment={self.max_segment}, window={self.window}, {kind}, {self.nbytes / 2**20:.1f} MiB)"
        )

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append a segment's keys [B, Hkv, L, d_key] and values [B, Hkv, L, d_value], and drop the
        oldest beyond mem_len.

        They are cast to the cache's dtype.

        Raises:
            TypeError: k or v is no tensor of a floating-point dtype.
            ValueError: L is above max_segment, or another axis differs from the cache's.
            RuntimeError: an error interrupted several appends before; or the step is captured in a
                CUDA graph, exported or traced. The offsets of the positions are integers of the
                host, so every run of the graph would read and overwrite those of the traced call.
                (torch.compile follows them. torch 2.6 exports without this error.)
        """
        if self._keys.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "cache must not be a KeyValueCache while a CUDA graph is captured: each replay would overwrite the "
                "same positions; make a StaticCache (new_cache(.., start=..))"
            )
        if is_recorded():
            self._refuse_graph()
        if self._lost:
            self.check_whole()
        self._check_segment(k, v)
        length, held = k.size(2), self._end - self._begin
        if self._end + length > self._keys.size(2):  # then begin >= mem_len >= held: source and target do not overlap
            for buffer in (self._keys, self._values):
                buffer[:, :, :held] = buffer[:, :, self._begin : self._end]
            self._begin, self._end = 0, held
        before = self._begin, self._end, self._total, self._last_reset, self._since
        rows = slice(self._end, self._end + length)
        self._keys[:, :, rows] = k.detach()
        self._values[:, :, rows] = v.detach()
        self._end += length
        self._begin = max(self._begin, self._end - self.mem_len)
        self._total += length
        if self._total - self._last_reset >= self.mem_len:  # nothing held is older than a reset
            self._since = None
        self._before, self.appends = before, self.appends + 1

    def take_back(self, appends: int) -> None:
        """Restore the positions held before the last append. Where it was taken back already, or
        there were more appends than one, the cache raises RuntimeError from now on until it is
        cleared.

        appends: 0 or more.
        """
        if appends == 1 and self._before is not None:
            self._begin, self._end, self._total, self._last_reset, self._since = self._before
            self._before = None
            self.appends -= 1
        elif appends:
            self._lost = True

    def _refuse_graph(self) -> NoReturn:
        raise RuntimeError(
            f"cache must not be a {type(self).__name__} while a step is exported or traced: each run of the graph would "
            "read and overwrite the same positions; give the memory as hidden states, or run the layer eagerly"
        )

    def check_whole(self) -> None:
        """Raise RuntimeError if an error interrupted a call and positions are missing."""
        if self._lost:
            raise RuntimeError(
                "cache is not whole, because an error interrupted a replayed step, or a call of several segments: clear() it"
            )

    def _check_segment(self, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name} must be a tensor of a floating-point dtype, got {got}")
        length = k.size(2)
        shape = (self._keys.size(-4), self.n_kv_head, length)
        if k.shape != (*shape, self.d_key) or v.shape != (*shape, self.d_value) or length > self.max_segment:
            axes = f"{self.batch}, {self.n_kv_head}, L <= {self.max_segment}"
            raise ValueError(
                f"k and v must be [{axes}, {self.d_key}] and [{axes}, {self.d_value}], got {list(k.shape)} and "
                f"{list(v.shape)}"
            )

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
        for buffer in (self._keys, self._values):
            buffer[:, :, held] = buffer[:, :, held].index_select(0, rows)
        if self._since is not None:
            self._since = self._since.index_select(0, rows)

    def _check_rows(self, rows: Tensor, dtype: torch.dtype, what: str, name: str = "rows") -> None:
        if not isinstance(rows, Tensor) or rows.dtype != dtype:
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{name} must be {what}, got {got}")
        if rows.shape != (self.batch,) or rows.device != self.device:
            raise ValueError(
                f"{name} must be [B] = [{self.batch}] on {self.device}, got shape {list(rows.shape)} on {rows.device}"
            )

    def clear(self) -> None:
        """Drop all positions held."""
        self._lost = False
        self._begin = self._end = self._total = self._last_reset = 0
        self._since = None
