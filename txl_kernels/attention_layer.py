"""The base of attention layers over a segment and its memory: projections, heads, caches, packed
sequences and checks. A subclass adds the table of distances and the other terms of the scores."""

import abc
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels import backends, composed
from txl_kernels.bounds import bounds_from_cu_seqlens
from txl_kernels.cache import KeyValueCache, Owner, unchanged_on_error
from txl_kernels.call import Call, seen_by_any
from txl_kernels.checks import (
    WINDOW,
    Window,
    autocast_dtype,
    broadcast_bound,
    check_dense,
    check_integer,
    check_number,
    refuse_unknown,
    span,
)
from txl_kernels.composed import Chunk, check_chunk
from txl_kernels.functional import rel_attention, rel_attention_weights
from txl_kernels.linear import ALL, project, project_parts
from txl_kernels.static_cache import StaticCache
from txl_kernels.torch_state import exporting_to_onnx

UNIT = 8  # elements of a 16-bit type in 16 bytes


def loads_by_units(device: torch.device) -> bool:
    """Whether the device's kernels are much slower if the width of rows is not a multiple of
    UNIT elements.

    True on a GPU: there, tensors of such widths (the paper's 41, say) are padded once, after their
    projection.
    """
    return device.type == "cuda"


def _padded(x: Tensor) -> Tensor:
    """Return x with its last axis padded by zeros to a multiple of UNIT."""
    missing = -x.size(-1) % UNIT
    return F.pad(x, (0, missing)) if missing else x


def _max_start(own: Tensor, start: Tensor | None, q: Tensor) -> Tensor:
    """Return the larger of a cache's start [B, 1] and the given start, for each query: int32 [B, 1]
    or [B, L]."""
    given = broadcast_bound("start", start, q)
    if given is None:
        return own
    return torch.where(given < 0, given, torch.maximum(own, given))  # what is out of range stays so, and raises later


def _max_length(cu_seqlens: Tensor | None, length: int) -> int:
    """The greatest number of positions that one attention covers: that of the longest packed
    sequence if it can be read without a device synchronization, else `length`."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return length
    return int(cu_seqlens.diff().max()) if cu_seqlens.size(0) > 1 else 0


class Terms(NamedTuple):
    """The terms that a layer adds to the scores q . k and to the softmax, as in `rel_attention`.

    content_bias [H, D], position_bias [H, Dp], q_pos [B, H, L, Dp] and sink [H], or None.
    """

    content_bias: Tensor | None = None
    position_bias: Tensor | None = None
    q_pos: Tensor | None = None
    sink: Tensor | None = None


class AttentionLayer(nn.Module, abc.ABC):
    """The base of attention layers over a segment and its memory, with positions in a table r.

    A subclass defines the table and the terms of the scores. The arguments are those of
    `RelAttention`.

    Attributes:
        scale: the factor of q . k; None for 1 / sqrt(width of the heads).
        position_scale: the factor of the terms of r; None for `scale`.
        outside: what distances without a row of r mean, "refuse" or "zero", as in `rel_attention`.
        shown: the names of the attributes that `repr` shows.
    """

    scale: float | None = None
    position_scale: float | None = None
    outside: Literal["refuse", "zero"] = "refuse"
    shown: tuple[str, ...] = (
        "d_model", "n_head", "d_head", "n_kv_head", "attn_dropout", "causal", "window", "chunk", "batch_first", "backend",
    )  # fmt: skip
    # torch.jit.trace compiles all other properties in a model that has methods with @jit.export.
    __jit_unused_properties__ = ("kernel_width", "_like", "_head_axes", "_batch_axis", "_kv_rows")

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        *,
        n_kv_head: int | None = None,
        attn_dropout: float = 0.0,
        causal: bool = True,
        window: Window = None,
        chunk: Chunk = None,
        batch_first: bool = True,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            refuse_unknown(type(self).__name__, unknown)
        super().__init__()
        for name, size in (("d_model", d_model), ("n_head", n_head)):
            check_integer(name, size, 1, "an integer >= 1")
        if d_head is None:
            if d_model % n_head:
                raise ValueError(
                    f"d_model must be a multiple of n_head when d_head is not given, got {d_model}, {n_head}"
                )
            d_head = d_model // n_head
        check_integer("d_head", d_head, 1, "an integer >= 1")
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        check_integer("n_kv_head", n_kv_head, 1, "None or an integer >= 1")
        if n_head % n_kv_head:
            raise ValueError(f"n_kv_head must be a divisor of n_head={n_head}, got {n_kv_head}")
        check_number("attn_dropout", attn_dropout, 0, 1, "in [0, 1)")
        span(causal, window)  # checks them
        if chunk is not None:
            check_chunk(chunk, causal)
        for name, flag in (("batch_first", batch_first), ("bias", bias)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {type(flag).__name__}")
        backends.check_name(backend)
        self.backend = None if backend is None else str.__str__(backend)
        self.d_model, self.n_head, self.d_head, self.n_kv_head = d_model, n_head, d_head, n_kv_head
        self.attn_dropout, self.causal, self.window = attn_dropout, causal, window
        self.chunk, self.batch_first = chunk, batch_first
        self._identity = Owner(self)
        width, kv_width = n_head * d_head, n_kv_head * d_head
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(d_model, width + 2 * kv_width, bias=bias, **factory)  # rows: q, then k, then v
        self.out = nn.Linear(width, d_model, bias=bias, **factory)

    @abc.abstractmethod
    def _table(
        self, length: int, memory_len: int, positions: Tensor | None = None, *, like: Tensor
    ) -> tuple[Tensor, int]:
        """Return the table r, [H, T, Dp] or [1, T, Dp], and its row of distance 0.

        length, memory_len: L and M of the segment and the memory that read it.
        positions: None, or the argument of `forward` that takes their place.
        like: hidden states, on whose device positions are made.
        """

    @abc.abstractmethod
    def _terms(self, x: Tensor) -> Terms:
        """Return the terms of the scores of a segment x [B, L, d_model] or [L, B, d_model]."""

    @property
    @abc.abstractmethod
    def _like(self) -> Tensor:
        """A parameter that has the dtype and device of hidden states."""

    @property
    def kernel_width(self) -> int:
        """The width of the heads in the call of the kernel."""
        return self.d_head

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._identity = Owner(self)  # a copy is another layer

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise RuntimeError: torch.jit.script calls this method of every module in a model."""
        raise RuntimeError(
            f"torch.jit.script does not take {type(self).__name__}, whose code is not TorchScript; use torch.export.export, "
            "torch.compile or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)

    def _by_head(self, x: Tensor, width: int) -> Tensor:
        """Return [B, L, heads * width] or [L, B, heads * width] as a view [B, heads, L, width]."""
        heads: Tensor = x.unflatten(-1, (-1, width))
        return heads.permute(self._head_axes)

    @property
    def _head_axes(self) -> tuple[int, int, int, int]:
        """The permutation of [B, L, heads, width] or [L, B, heads, width] to [B, heads, L,
        width]."""
        return (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)

    def _heads_last(self, x: Tensor) -> Tensor:
        """Return [B, heads, L, width] as a view [B, L, heads, width] or [L, B, heads, width]."""
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(2, 0, 1, 3)

    def _merge(self, x: Tensor) -> Tensor:
        """Return [B, H, L, D] as [B, L, H * D] or [L, B, H * D], without a copy if the kernel kept
        q's strides."""
        return self._heads_last(x).flatten(-2)

    @torch.no_grad()
    def new_cache(
        self,
        batch: int,
        mem_len: int | None = None,
        max_segment: int | None = None,
        *,
        window: int | None = None,
        like: Tensor | None = None,
        start: Tensor | None = None,
    ) -> KeyValueCache:
        """Return an empty key/value cache. That of a layer with sinusoids holds W_kR R of the
        parameters' present values, and of the layer's `clamp_len`.

        A layer with chunks reads one chunk at a time: max_segment must be the size of a chunk, and
        only the last segment of a stream may be shorter. If mem_len is left * size, the outputs
        equal those of one call for the whole stream.

        batch: B.
        mem_len: positions that the cache holds; None for all that a query sees before its own (of
            a window those but one, of chunks left * size).
        max_segment: positions of the largest segment; None for 1, or for the size of a chunk.
        window: None for the layer's own.
        like: hidden states, whose dtype and device the cache has; None for those of the layer's
            parameters.
        start: None, or int32 [B, 1] on that device for a `StaticCache`, which CUDA graphs can
            read and write; the layers of a model share it.

        Raises:
            TypeError, ValueError: an argument is wrong (the message names it), mem_len is None and
                queries see all keys before their own, the layer is neither causal nor chunked, or
                the parameters are offloaded (on "meta") and `like` is None.
        """
        if window is not None:
            check_integer("window", window, 1, WINDOW)
        if like is not None and not isinstance(like, Tensor):
            raise TypeError(f"like must be None or hidden states, got {type(like).__name__}")
        if not self.causal and self.chunk is None:
            raise ValueError("a key/value cache needs causal=True, or chunks: an earlier position would see later ones")
        window = self.window if window is None else window  # type: ignore[assignment]
        if max_segment is None:
            max_segment = 1 if self.chunk is None else self.chunk[0]
        if mem_len is None:
            mem_len = self._reach(window)
        if self.chunk is not None and max_segment != self.chunk[0]:
            raise ValueError(f"max_segment must be the size of a chunk, {self.chunk[0]}, got {max_segment}")
        if like is None:
            like = self._like
            if like.is_meta and "forward" in vars(self):  # accelerate's hook loads parameters only for forward
                raise ValueError("like must be given where the layer's parameters are offloaded: pass like=x")
        r, zero_row = self._cache_table(max_segment, mem_len, like)
        cache = (KeyValueCache if start is None else functools.partial(StaticCache, start))(
            r, batch, mem_len, max_segment, window, zero_row,
            n_kv_head=self.n_kv_head, d_key=self.kernel_width, dtype=like.dtype if r is None else r.dtype,
            device=like.device,
        )  # fmt: skip
        self._check_owner(cache)
        cache.made_of = None if r is None else self._table_state()
        return cache

    def _reach(self, window: Window) -> int:
        """The number of keys before its own that a query sees at most.

        Raises:
            ValueError: it sees all.
        """
        left, _ = span(self.causal, window)
        if self.chunk is not None and self.chunk[1] is not None:
            reach = self.chunk[0] * self.chunk[1]
            return reach if left is None else min(left, reach)
        if left is None:
            raise ValueError("mem_len must be given for a layer without a window, whose queries see all keys, got None")
        return left

    def _cache_table(self, max_segment: int, mem_len: int, like: Tensor) -> tuple[Tensor | None, int]:
        """Return the table r that a cache holds and its row of distance 0; None if each call makes
        it. like: as in `new_cache`."""
        return None, 0

    def _table_state(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Return the identities and versions of the parameters from which a cache's table is
        computed, with settings; and the parameters, so that no other gets their identity as long
        as the result is kept. Caches without a table need none."""
        return (), ()

    def update_cache(self, cache: KeyValueCache, like: Tensor | None = None, *, if_changed: bool = False) -> None:
        """Compute the table r of a cache anew, in the same memory, from the parameters' present
        values.

        `forward` does so if one was replaced or modified since. Their versions tell of changes in
        place, but not of those through `.data` or by a replayed CUDA graph.
        Keys and values in the cache remain those of the earlier parameters.

        cache: a cache that `new_cache` of this layer made. like: as in `new_cache`.
        if_changed: whether versions are compared first, as `forward` does.
        """
        if cache.made_of is None or cache.r is None:
            return
        if if_changed and cache.made_of[0] == self._table_state()[0]:
            return
        with torch.no_grad():
            r, _ = self._cache_table(cache.max_segment, cache.mem_len, self._like if like is None else like)
        assert r is not None
        with torch.inference_mode():  # writes to tensors of any mode
            cache.r.copy_(r)
        cache.made_of = self._table_state()

    @torch.no_grad()
    def fill_cache(self, cache: KeyValueCache, memory: Tensor) -> None:
        """Append the keys and values of hidden states [B, M, d_model] (or [M, B, d_model]) to the
        cache.

        Raises:
            TypeError: cache is no KeyValueCache, or memory no tensor.
            ValueError: memory does not have three axes, the width d_model and the cache's batch, or
                does not consist of whole chunks in a layer with chunks; or the cache belongs to
                another layer.
        """
        if not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache of new_cache, got {type(cache).__name__}")
        check_dense("memory", memory, "hidden states [B, M, d_model]")
        if memory.dim() != 3 or memory.size(-1) != self.d_model:
            raise ValueError(f"memory must be three-dimensional with d_model={self.d_model}, got {list(memory.shape)}")
        if memory.size(self._batch_axis) != cache.batch:
            raise ValueError(f"memory must have the cache's batch {cache.batch}, got shape {list(memory.shape)}")
        if self.chunk is not None and memory.size(1 - self._batch_axis) % self.chunk[0]:
            raise ValueError(
                f"memory must be whole chunks of {self.chunk[0]} positions, got shape {list(memory.shape)}"
            )
        self._check_chunk(cache)
        self._check_owner(cache)
        k, v = self._split(*project_parts(self.qkv, 1 - self._batch_axis, (memory, self._kv_rows)))
        with unchanged_on_error([cache]):
            for first in range(0, k.size(2), cache.max_segment):
                part = slice(first, first + cache.max_segment)
                cache.append(k[:, :, part], v[:, :, part])

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *others: NoReturn,
        positions: Tensor | None = None,
        start: Tensor | None = None,
        end: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Compute the attention of a segment over its memory and itself.

        Args:
            x: [B, L, d_model] (or [L, B, d_model], see `batch_first`).
            memory: None, or the hidden states [B, M, d_model] (or [M, B, d_model]) of the positions
                before x. The paper detaches them from the graph; this method does not.
            positions: None to compute the layer's own, or the result of its method `positions`
                (after dropout, say), which layers can share: in `RelAttention` encodings [T,
                d_model] of distances 0, 1, .., or from -(L - 1) on if not causal. A layer with one
                learned table takes none.
            start, end: as in `rel_attention`.
            cu_seqlens: None, or int32 or int64 [sequences + 1], the offsets of sequences that are
                packed into one batch row (B = 1); see `bounds_from_cu_seqlens`. Each sequence sees
                only itself, and its result equals that of a call for it alone. Memory, cache,
                `start`, `end` and chunks must be None: they count keys from the batch row's start.
            cache: None, or a cache that `new_cache` of this layer made. The keys and values in it
                are the memory, and those of x are appended, unless the call raises. The result
                equals that of a call with the hidden states as `memory`. Only for evaluation. Batch
                rows that `cache.reset(rows)` restarted do not see earlier positions. `start` and
                `end` count keys from the first of the len(cache) positions held. Each layer needs
                its own cache.

        Returns:
            The layer's output, of x's shape and dtype (under torch.autocast, its dtype).

        Raises:
            TypeError, ValueError, RuntimeError: an argument is wrong; the message names it. A mask
                is refused: `txl_kernels.intervals` converts it to `start` and `end`.
        """
        if others:
            raise TypeError(
                f"{type(self).__name__} takes x and memory, hidden states that it projects to queries, keys and values "
                f"itself, got {2 + len(others)} positional arguments"
            )
        if unknown:
            refuse_unknown(type(self).__name__, unknown)
        self._check_input(x)
        if cu_seqlens is not None:
            given = {"memory": memory, "cache": cache, "start": start, "end": end, "chunk": self.chunk}
            self._check_packed(x, given)
            start, end = bounds_from_cu_seqlens(cu_seqlens, x.size(1 - self._batch_axis))
            if start.device != x.device:
                raise ValueError(f"cu_seqlens must be on x's device {x.device}, got {start.device}")
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                raise TypeError(f"cache must be None or a KeyValueCache of new_cache, got {type(cache).__name__}")
            key: Any = (self._identity, self.training, x.shape, x.dtype, x.device)
            alone = memory is None and positions is None and not torch.is_grad_enabled()
            is_compiling = torch.compiler.is_compiling()
            if is_compiling or not alone or cache.checked != key:
                self._check_cache(cache, x, memory, positions)
                if not is_compiling:  # sizes may be symbols
                    cache.checked = key if x.dtype == cache.dtype and not self.training else None
            if self.chunk is not None:
                self._check_chunk(cache)
            if cache.made_of is not None and not is_compiling and cache.made_of[0] != self._table_state()[0]:
                self.update_cache(cache, x)
        elif memory is not None:
            self._check_memory(memory, x)
        if memory is not None and torch.is_grad_enabled() and not exporting_to_onnx():
            memory = self._without_unseen(memory, x, start, end)
        (q, k, v), k_and_v = self._project(x, memory)
        u, w, q_pos, sink = self._terms(x)
        length, width, scale, window = q.size(2), q.size(-1), self.scale, self.window
        if cache is not None:
            k_and_v, window = cache.memory, cache.window
            begin = cache.start
            start = start if begin is None else _max_start(begin, start, q)
        if cache is not None and cache.r is not None:
            r, zero_row = cache.r, cache.zero_row
        else:
            reach = _max_length(cu_seqlens, length) if positions is None else length
            memory_len = 0 if k_and_v is None else k_and_v[0].size(2)
            r, zero_row = self._table(reach, memory_len, positions, like=x)
        if cache is None and loads_by_units(q.device):
            if scale is None and width % UNIT:
                scale = width**-0.5
            q, k, v, r = (_padded(x) for x in (q, k, v, r))
            u, w, q_pos = (None if x is None else _padded(x) for x in (u, w, q_pos))
            k_and_v = None if k_and_v is None else (_padded(k_and_v[0]), _padded(k_and_v[1]))
        out = rel_attention(
            q, k, v, r, u, w, k_and_v, q_pos=q_pos, causal=self.causal, window=window, chunk=self.chunk, start=start,
            end=end, zero_row=zero_row, outside=self.outside, scale=scale, position_scale=self.position_scale, sink=sink,
            dropout_p=self.attn_dropout if self.training else 0.0, backend=self.backend,
        )  # fmt: skip
        if out.size(-1) > width:
            out = out[..., :width]
        attended = project(self.out, self._merge(out))
        if cache is not None:  # last, so that a call that fails leaves the cache as it was
            cache.append(k, v)
        return attended

    if TYPE_CHECKING:  # the signature of `forward`, which nn.Module's __call__ hides

        def __call__(
            self, x: Tensor, memory: Tensor | None = None, *others: NoReturn, positions: Tensor | None = None,
            start: Tensor | None = None, end: Tensor | None = None, cu_seqlens: Tensor | None = None,
            cache: KeyValueCache | None = None, **unknown: NoReturn,
        ) -> Tensor: ...  # fmt: skip

    def weights(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the attention weights of `forward` before dropout, float32 [B, H, L, M + L].

        x, memory: as in `forward`.

        Raises:
            TypeError, ValueError: as in `forward`, and if the layer has chunks.
        """
        if self.chunk is not None:
            raise ValueError(f"chunk must be None, got a layer with chunk={self.chunk}")
        self._check_input(x)
        if memory is not None:
            self._check_memory(memory, x)
        (q, k, _), k_and_v = self._project(x, memory)
        r, zero_row = self._table(q.size(2), 0 if k_and_v is None else k_and_v[0].size(2), like=x)
        u, w, q_pos, sink = self._terms(x)
        return rel_attention_weights(
            q, k, r, u, w, k_and_v, q_pos=q_pos, causal=self.causal, window=self.window, zero_row=zero_row,
            outside=self.outside, scale=self.scale, position_scale=self.position_scale, sink=sink,
        )  # fmt: skip

    @property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    @property
    def _kv_rows(self) -> slice:
        """The outputs of `qkv` that are keys and values."""
        return slice(self.n_head * self.d_head, None)

    def _check_input(self, x: Tensor) -> None:
        check_dense("x", x, "x.values()[None] with cu_seqlens=x.offsets()")
        if x.dim() != 3 or x.size(-1) != self.d_model:
            layout = "[B, L, d_model]" if self.batch_first else "[L, B, d_model]"
            raise ValueError(f"x must be {layout} with d_model={self.d_model}, got shape {list(x.shape)}")

    def _check_packed(self, x: Tensor, given: dict[str, Any]) -> None:
        for name, what in given.items():
            if what is not None:
                raise ValueError(f"{name} must be None with cu_seqlens: packed sequences see themselves alone")
        if x.size(self._batch_axis) != 1:
            raise ValueError(f"x must be one row (B = 1) with cu_seqlens, got shape {list(x.shape)}")

    def _check_memory(self, memory: Tensor, x: Tensor) -> None:
        check_dense("memory", memory, "hidden states [B, M, d_model]")
        if memory.dim() != 3 or memory.size(self._batch_axis) != x.size(self._batch_axis):
            raise ValueError(f"memory must be like x but for its length, got {list(memory.shape)} for {list(x.shape)}")
        if memory.size(-1) != self.d_model:
            raise ValueError(f"memory must be three-dimensional with d_model={self.d_model}, got {list(memory.shape)}")
        if memory.device != x.device:
            raise ValueError(f"memory must be on x's device {x.device}, got {memory.device}")
        if memory.dtype != x.dtype and autocast_dtype(x.device.type) is None:
            raise TypeError(
                f"memory must have x's dtype {x.dtype}, got {memory.dtype}; convert it or use torch.autocast"
            )

    def _check_cache(self, cache: KeyValueCache, x: Tensor, memory: Tensor | None, positions: Tensor | None) -> None:
        if memory is not None or positions is not None:
            raise ValueError(
                "cache must be given alone, got memory or positions beside it, which it holds or which follow from it"
            )
        if cache.r is not None and self.outside == "zero":  # of new_cache it holds none
            raise ValueError(
                f"cache must hold no table r, because this layer has its own, got r of shape {list(cache.r.shape)}; make "
                "the cache with new_cache"
            )
        if torch.is_grad_enabled():
            raise RuntimeError("cache is for evaluation: call the layer under torch.no_grad() or inference_mode()")
        if self.training and self.attn_dropout > 0:
            raise RuntimeError(
                f"cache is for evaluation: in training mode this layer drops weights with attn_dropout={self.attn_dropout}; "
                "call eval() on it first"
            )
        held, own = (
            (cache.n_kv_head, cache.d_key, cache.d_value),
            (self.n_kv_head, self.kernel_width, self.kernel_width),
        )
        if held != own:
            raise ValueError(
                f"cache must be this layer's, with n_kv_head, d_key and d_value {own}, got one with {held}"
            )
        if cache.device != x.device:
            raise ValueError(f"cache must be on x's device {x.device}, got {cache.device}")
        if cache.dtype != x.dtype and autocast_dtype(x.device.type) is None:
            raise TypeError(f"cache must have x's dtype {x.dtype}, got {cache.dtype}; make a new one with new_cache")
        if x.size(self._batch_axis) != cache.batch:
            raise ValueError(f"x must have the cache's batch {cache.batch}, got shape {list(x.shape)}")
        if x.size(1 - self._batch_axis) > cache.max_segment:
            raise ValueError(
                f"x must be a segment of at most max_segment={cache.max_segment} positions, for which the cache was made, "
                f"got shape {list(x.shape)}"
            )
        self._check_owner(cache)

    def _check_chunk(self, cache: KeyValueCache) -> None:
        """Raise ValueError if the next segment would begin inside a chunk."""
        if self.chunk is not None and cache.appended % self.chunk[0]:
            raise ValueError(
                f"cache must hold whole chunks of {self.chunk[0]} positions before the next segment, got {cache.appended} "
                "appended positions: pass one chunk in each call, and reset the cache after a shorter one"
            )

    def _check_owner(self, cache: KeyValueCache) -> None:
        """Make this layer the owner of the cache.

        Raises:
            ValueError: the cache belongs to another layer, or is a copy of the cache of a layer
                with other parameters.
        """
        if isinstance(cache.owner, str):
            if not cache.owner or cache.owner != self._identity.digest():
                raise ValueError(
                    "cache must be this layer's own, got a copy of the cache of a layer with other parameters, or with "
                    "parameters that could not be read (it is gone, or offloaded): make one for each with its new_cache"
                )
        elif cache.owner is not None and cache.owner is not self._identity:
            raise ValueError(
                "cache must be this layer's own, got another layer's: make one for each with its new_cache"
            )
        cache.owner = self._identity

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split the output of `qkv`, [B, L, heads * D] or [L, B, heads * D], into q, k and v, or
        only k and v: views [B, heads, L, D] each."""
        x, n, axes = projected.unflatten(-1, (-1, self.d_head)), self.n_kv_head, self._head_axes
        queries = x.size(2) - 2 * n
        k, v = x.narrow(2, queries, n).permute(axes), x.narrow(2, queries + n, n).permute(axes)
        return (x.narrow(2, 0, queries).permute(axes), k, v) if queries else (k, v)

    def _project(self, x: Tensor, memory: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """Return (q, k, v) of a segment, and (k_mem, v_mem) of its memory or None."""
        if memory is None:
            return self._split(project(self.qkv, x)), None
        of_memory, of_x = project_parts(self.qkv, 1 - self._batch_axis, (memory, self._kv_rows), (x, ALL))
        k_mem, v_mem = self._split(of_memory)
        return self._split(of_x), (k_mem, v_mem)

    def _without_unseen(self, memory: Tensor, x: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
        """Return the memory with zeros at positions that no query sees.

        The gradients of their keys and values are zero, but the gradient of the projection's weight
        is a sum of these zeros times the hidden states, which is NaN where a hidden state is NaN.
        """
        left, right = span(self.causal, self.window)
        q, k_mem = ((t if self.batch_first else t.transpose(0, 1)).unsqueeze(1) for t in (x, memory))
        # A graph serves all lengths: it must not depend on the length of this memory.
        is_within = left is None or (not torch.compiler.is_compiling() and k_mem.size(2) <= left)
        if is_within and start is None and end is None and self.chunk is None:
            return memory
        fields: dict[str, Any] = {"q": q, "k_mem": k_mem, "start": start, "end": end, "left": left, "right": right}
        nothing: dict[str, Any] = dict.fromkeys(Call._fields)  # torch.compile of torch 2.6 does not follow a | of dicts
        call = composed.without_chunk(Call(**{**nothing, **fields}), self.chunk)
        seen = seen_by_any(call)[:, : k_mem.size(2)]
        return torch.where((seen if self.batch_first else seen.t()).unsqueeze(-1), memory, memory.new_zeros(()))
