"""Attention layers over a segment and its memory. `SegmentAttention` has the projections, heads,
caches and checks; `RelAttention`, the paper's layer, adds the projection of positions and the
biases."""

import abc
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from txl_kernels import backends, composed
from txl_kernels.bounds import bounds_from_cu_seqlens
from txl_kernels.cache import KeyValueCache
from txl_kernels.call import Call, seen_by_any
from txl_kernels.checks import WINDOW, Window, autocast_dtype, broadcast_bound, check_integer, check_number, span
from txl_kernels.composed import Chunk, check_chunk
from txl_kernels.functional import rel_attention, rel_attention_weights
from txl_kernels.linear import ALL, project, project_parts
from txl_kernels.positions import sinusoid

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
    return F.pad(x, (0, -x.size(-1) % UNIT))


def _later(own: Tensor | None, start: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the larger of a cache's start [B, 1] and the given start, for each query: int32 [B, 1]
    or [B, L], or None."""
    if own is None or start is None:
        return start if own is None else own
    given = broadcast_bound("start", start, q)
    if given is None:
        return None
    return torch.where(given < 0, given, torch.maximum(own, given))  # what is out of range stays so, and raises later


def _longest(cu_seqlens: Tensor | None, length: int) -> int:
    """The greatest number of positions that one attention covers: that of the longest packed
    sequence if it can be read without a device synchronization, else `length`."""
    if cu_seqlens is None or cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return length
    return int(cu_seqlens.diff().max()) if cu_seqlens.size(0) > 1 else 0


class Projections(NamedTuple):
    """Projections of a layer: q and k [B, H, L, D], k_mem [B, H, M, D] or None, and the table r [H,
    T, D]."""

    q: Tensor
    k: Tensor
    k_mem: Tensor | None
    r: Tensor


class SegmentAttention(nn.Module, abc.ABC):
    """The base of attention layers whose positions are a table r, one vector for each distance.

    A subclass defines the table and the biases. The arguments are those of `RelAttention`.

    Attributes:
        scale: the factor of the scores; None for 1 / sqrt(width of the heads).
    """

    scale: float | None = None

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        *,
        attn_dropout: float = 0.0,
        causal: bool = True,
        window: Window = None,
        chunk: Chunk = None,
        clamp_len: int | None = None,
        batch_first: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("n_head", n_head)):
            check_integer(name, size, 1, ">= 1")
        if d_head is None:
            if d_model % n_head:
                raise ValueError(
                    f"d_model must be a multiple of n_head when d_head is not given, got {d_model}, {n_head}"
                )
            d_head = d_model // n_head
        check_integer("d_head", d_head, 1, ">= 1")
        check_number("attn_dropout", attn_dropout, 0, 1, "in [0, 1)")
        if clamp_len is not None:
            check_integer("clamp_len", clamp_len, 0, "None or >= 0")
        span(causal, window)  # checks them
        if chunk is not None:
            check_chunk(chunk, causal)
        backends.check_name(backend)
        self.d_model, self.n_head, self.d_head = d_model, n_head, d_head
        self.attn_dropout, self.causal, self.window, self.clamp_len = attn_dropout, causal, window, clamp_len
        self.chunk, self.batch_first, self.backend = chunk, batch_first, backend
        self._identity = object()  # the identity that a cache's `owner` records
        width = n_head * d_head
        self.qkv = nn.Linear(d_model, 3 * width, bias=False, device=device, dtype=dtype)  # rows: q, then k, then v
        self.out = nn.Linear(width, d_model, bias=False, device=device, dtype=dtype)

    @abc.abstractmethod
    def positions(
        self, length: int, memory_len: int, clamp_len: int | None = None, *, like: Tensor | None = None
    ) -> Tensor:
        """Return the argument of `project_positions`: positions [T, ..] for every distance at which
        a query of the segment sees a key.

        Row 0 has distance 0, or -(length - 1) if the layer is not causal.

        length, memory_len: L and M.
        clamp_len: the largest distance; None for the layer's own `clamp_len`.
        like: hidden states, whose dtype and device the result has; None for those of the biases.
        """

    @abc.abstractmethod
    def project_positions(self, positions: Tensor) -> Tensor:
        """Return the table r, [H, T, kernel_width], of T positions."""

    @abc.abstractmethod
    def biases(self) -> tuple[Tensor, Tensor]:
        """Return content and position bias, [H, kernel_width] each."""

    @property
    def kernel_width(self) -> int:
        """The width of the heads in the call of the kernel."""
        return self.d_head

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise RuntimeError: torch.jit.script calls this method of every module in a model."""
        raise RuntimeError(
            f"torch.jit.script does not take {type(self).__name__}, whose code is not TorchScript; use torch.export.export, "
            "torch.compile or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        shown = (
            "d_model", "n_head", "d_head", "attn_dropout", "causal", "window", "chunk", "clamp_len", "batch_first",
            "backend",
        )  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def _heads(self, x: Tensor) -> Tensor:
        """Return [B, L, H * D] or [L, B, H * D] as a view [B, H, L, D]."""
        x = x.unflatten(-1, (self.n_head, self.d_head))
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge(self, x: Tensor) -> Tensor:
        """Return [B, H, L, D] as [B, L, H * D] or [L, B, H * D], without a copy if the kernel kept
        q's strides."""
        return (x.permute(0, 2, 1, 3) if self.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)

    def distances(self, length: int, memory_len: int, clamp_len: int | None, device: torch.device) -> Tensor:
        """Return the distances at which queries of a segment see keys, int64 [T], clamped to
        +-clamp_len."""
        first = 0 if self.causal else -max(length - 1, 0)
        distances = torch.arange(first, memory_len + length, device=device)
        clamp_len = self.clamp_len if clamp_len is None else clamp_len
        return distances if clamp_len is None else distances.clamp(-clamp_len, clamp_len)

    @torch.no_grad()
    def new_cache(
        self,
        batch: int,
        mem_len: int,
        max_segment: int,
        *,
        window: int | None = None,
        clamp_len: int | None = None,
        like: Tensor | None = None,
    ) -> KeyValueCache:
        """Return an empty key/value cache that holds W_kR R of the parameters' present values.

        A layer with chunks reads one chunk at a time: max_segment must be the size of a chunk. If
        mem_len is left * size, the outputs equal those of one call for the whole stream.

        batch: B.
        mem_len, max_segment: positions that the cache holds, and the largest segment.
        window, clamp_len: None for the layer's own.
        like: hidden states, whose dtype and device the cache has; None for those of the biases.

        Raises:
            TypeError, ValueError: an argument is wrong (the message names it), the layer is neither
                causal nor chunked, or the biases are offloaded (on "meta") and `like` is None.
        """
        if window is not None:
            check_integer("window", window, 1, WINDOW)
        if clamp_len is not None:
            check_integer("clamp_len", clamp_len, 0, "None or >= 0")
        if not self.causal and self.chunk is None:
            raise ValueError("a key/value cache needs causal=True, or chunks: an earlier position would see later ones")
        if self.chunk is not None and max_segment != self.chunk[0]:
            raise ValueError(f"max_segment must be the size of a chunk, {self.chunk[0]}, got {max_segment}")
        if like is None:
            like = self.biases()[0]
            if like.is_meta and "forward" in vars(self):  # accelerate's hook loads parameters only for forward
                raise ValueError("like must be given where the layer's parameters are offloaded: pass like=x")
        r = self.project_positions(self.positions(max_segment, mem_len, clamp_len, like=like)).contiguous()
        zero_row = 0 if self.causal else max_segment - 1
        cache = KeyValueCache(r, batch, mem_len, max_segment, self.window if window is None else window, zero_row)
        self._own(cache)
        return cache

    @torch.no_grad()
    def fill_cache(self, cache: KeyValueCache, memory: Tensor) -> None:
        """Append the keys and values of hidden states [B, M, d_model] (or [M, B, d_model]) to the
        cache.

        Raises:
            ValueError: memory does not have three axes, the width d_model and the cache's batch; or
                the cache belongs to another layer.
        """
        if memory.dim() != 3 or memory.size(-1) != self.d_model:
            raise ValueError(f"memory must be three-dimensional with d_model={self.d_model}, got {list(memory.shape)}")
        if memory.size(self._batch_axis) != cache.batch:
            raise ValueError(f"memory must have the cache's batch {cache.batch}, got shape {list(memory.shape)}")
        self._own(cache)
        keys_and_values = slice(self.n_head * self.d_head, None)
        k, v = self._split(*project_parts(self.qkv, 1 - self._batch_axis, (memory, keys_and_values)))
        for first in range(0, k.size(2), cache.max_segment):
            part = slice(first, first + cache.max_segment)
            cache.append(k[:, :, part], v[:, :, part])

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        start: Tensor | None = None,
        end: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Compute the attention of a segment over its memory and itself.

        Args:
            x: [B, L, d_model] (or [L, B, d_model], see `batch_first`).
            memory: None, or the hidden states [B, M, d_model] (or [M, B, d_model]) of the positions
                before x. The paper detaches them from the graph; this method does not.
            positions: None to compute the layer's own, or the result of `positions` (after dropout,
                say), which layers can share: in `RelAttention` encodings [T, d_model] of distances
                0, 1, .., or from -(L - 1) on if not causal.
            start, end: as in `rel_attention`.
            cu_seqlens: None, or int32 or int64 [sequences + 1], the offsets of sequences that are
                packed into one batch row (B = 1); see `bounds_from_cu_seqlens`. Each sequence sees
                only itself, and its result equals that of a call for it alone. Memory, cache,
                `start`, `end` and chunks must be None: they count keys from the batch row's start.
            cache: None, or a cache that `new_cache` of this layer made. The keys and values in it
                are the memory, and those of x are appended. The result equals that of a call with
                the hidden states as `memory`. Only for evaluation. Batch rows that
                `cache.reset(rows)` restarted do not see earlier positions. `start` and `end` count
                keys from the first of the len(cache) positions held. Each layer needs its own
                cache.

        Returns:
            The layer's output, of x's shape and dtype (under torch.autocast, its dtype).

        Raises:
            TypeError, ValueError, RuntimeError: an argument is wrong; the message names it. A mask
                is refused: `txl_kernels.intervals` converts it to `start` and `end`.
        """
        if unknown:
            raise TypeError(
                f"{type(self).__name__} takes no {', '.join(unknown)}: what a query sees is said by start and end, and "
                "txl_kernels.intervals(mask, visible=...) makes both of a mask"
            )
        self._check_input(x)
        if cu_seqlens is not None:
            given = {"memory": memory, "cache": cache, "start": start, "end": end, "chunk": self.chunk}
            self._check_packed(x, given)
            start, end = bounds_from_cu_seqlens(cu_seqlens, x.size(1 - self._batch_axis))
            if start.device != x.device:
                raise ValueError(f"cu_seqlens must be on x's device {x.device}, got {start.device}")
        if cache is not None:
            self._check_cache(cache, x, memory, positions)
        elif memory is not None:
            self._check_memory(memory, x)
        if memory is not None and torch.is_grad_enabled():
            memory = self._without_unseen(memory, x, start, end)
        (q, k, v), k_and_v = self._project(x, memory)
        length = q.size(2)
        dropout_p = self.attn_dropout if self.training else 0.0
        if cache is not None:
            k_and_v = cache.memory
            r, zero_row, window = cache.r, cache.zero_row, cache.window
            start = _later(cache.start, start, q)
        else:
            window = self.window
            reach = length
            if positions is None:
                reach = _longest(cu_seqlens, length)
                positions = self.positions(reach, 0 if k_and_v is None else k_and_v[0].size(2), like=x)
            r, zero_row = self.project_positions(positions), 0 if self.causal else max(reach - 1, 0)
        (u, w), scale, width = self.biases(), self.scale, q.size(-1)
        if cache is None and width % UNIT and loads_by_units(q.device):
            q, k, v, r, u, w = (_padded(x) for x in (q, k, v, r, u, w))
            k_and_v = None if k_and_v is None else (_padded(k_and_v[0]), _padded(k_and_v[1]))
            scale = width**-0.5 if scale is None else scale
        out = rel_attention(
            q, k, v, r, u, w, k_and_v, causal=self.causal, window=window, chunk=self.chunk, start=start, end=end,
            zero_row=zero_row, scale=scale, dropout_p=dropout_p, backend=self.backend,
        )  # fmt: skip
        if out.size(-1) > width:
            out = out[..., :width]
        if cache is not None:
            cache.append(k, v)
        return project(self.out, self._merge(out))

    def weights(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the attention weights of `forward` before dropout, float32 [B, H, L, M + L].

        x, memory: as in `forward`.

        Raises:
            TypeError, ValueError: as in `forward`, and if the layer has chunks.
        """
        if self.chunk is not None:
            raise ValueError(f"chunk must be None, got a layer with chunk={self.chunk}")
        q, k, k_mem, r = self.projections(x, memory)
        return rel_attention_weights(
            q, k, r, *self.biases(), k_mem, causal=self.causal, window=self.window,
            zero_row=0 if self.causal else max(q.size(2) - 1, 0), scale=self.scale,
        )  # fmt: skip

    def projections(self, x: Tensor, memory: Tensor | None = None) -> Projections:
        """Return q, k, k_mem and r, of which the scores are made together with `biases`; x, memory
        and errors as in `forward`."""
        self._check_input(x)
        if memory is not None:
            self._check_memory(memory, x)
        (q, k, _), k_and_v = self._project(x, memory)
        k_mem = None if k_and_v is None else k_and_v[0]
        r = self.project_positions(self.positions(q.size(2), 0 if k_mem is None else k_mem.size(2), like=x))
        return Projections(q, k, k_mem, r)

    @property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    def _check_input(self, x: Tensor) -> None:
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
            raise ValueError("cache holds the memory and the encodings; pass neither memory nor positions with it")
        if torch.is_grad_enabled():
            raise RuntimeError("cache is for evaluation: call the layer under torch.no_grad() or inference_mode()")
        if self.training and self.attn_dropout > 0:
            raise RuntimeError(
                f"cache is for evaluation: in training mode this layer drops weights with attn_dropout={self.attn_dropout}; "
                "call eval() on it first"
            )
        if (cache.r.size(0), cache.r.size(2)) != (self.n_head, self.kernel_width):
            raise ValueError(
                f"cache must be this layer's, with H={self.n_head} and D={self.kernel_width}, got one "
                f"with H={cache.r.size(0)} and D={cache.r.size(2)}"
            )
        if cache.r.device != x.device:
            raise ValueError(f"cache must be on x's device {x.device}, got {cache.r.device}")
        if cache.r.dtype != x.dtype and autocast_dtype(x.device.type) is None:
            raise TypeError(f"cache must have x's dtype {x.dtype}, got {cache.r.dtype}; make a new one with new_cache")
        if x.size(self._batch_axis) != cache.batch:
            raise ValueError(f"x must have the cache's batch {cache.batch}, got shape {list(x.shape)}")
        if x.size(1 - self._batch_axis) > cache.max_segment:
            raise ValueError(
                f"x must be a segment of at most max_segment={cache.max_segment} positions, for which the cache was made, "
                f"got shape {list(x.shape)}"
            )
        self._own(cache)

    def _own(self, cache: KeyValueCache) -> None:
        """Make this layer the owner of the cache.

        Raises:
            ValueError: the cache belongs to another layer.
        """
        if cache.owner is not None and cache.owner is not self._identity:
            raise ValueError(
                "cache must be this layer's own, got another layer's: make one for each with its new_cache"
            )
        cache.owner = self._identity

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Split the output of `qkv` into parts [B, H, L, D]: q, k and v, or only k and v."""
        return tuple(self._heads(part) for part in projected.split(self.n_head * self.d_head, -1))

    def _project(self, x: Tensor, memory: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor] | None]:
        """Return (q, k, v) of a segment, and (k_mem, v_mem) of its memory or None."""
        if memory is None:
            return self._split(project(self.qkv, x)), None
        keys_and_values = slice(self.n_head * self.d_head, None)
        of_memory, of_x = project_parts(self.qkv, 1 - self._batch_axis, (memory, keys_and_values), (x, ALL))
        k_mem, v_mem = self._split(of_memory)
        return self._split(of_x), (k_mem, v_mem)

    def _without_unseen(self, memory: Tensor, x: Tensor, start: Tensor | None, end: Tensor | None) -> Tensor:
        """Return the memory with zeros at positions that no query sees.

        The gradients of their keys and values are zero, but the gradient of the projection's weight
        is a sum of these zeros times the hidden states, which is NaN where a hidden state is NaN.
        """
        left, right = span(self.causal, self.window)
        q, k_mem = ((t if self.batch_first else t.transpose(0, 1)).unsqueeze(1) for t in (x, memory))
        if start is None and end is None and self.chunk is None and (left is None or k_mem.size(2) <= left):
            return memory
        fields: dict[str, Any] = {"q": q, "k_mem": k_mem, "start": start, "end": end, "left": left, "right": right}
        call = composed.without_chunk(Call(**dict.fromkeys(Call._fields) | fields), self.chunk)  # type: ignore[arg-type]
        seen = seen_by_any(call)[:, : k_mem.size(2)]
        return torch.where((seen if self.batch_first else seen.t()).unsqueeze(-1), memory, memory.new_zeros(()))


class RelAttention(SegmentAttention):
    """Multi-head attention with relative positions and segment memory (paper, sections 3.2
    and 3.3).

    The layer has no residual connection, no layer norm and no dropout on the output.

    Args:
        d_model: width of the hidden states; even, because sinusoids come in pairs.
        n_head, d_head: number of heads H and their width D; d_head None for d_model // n_head.
        attn_dropout: probability of dropping an attention weight in training.
        causal, window, chunk: as in `rel_attention`.
        clamp_len: None, or the largest distance with an encoding of its own; greater ones share it.
        batch_first: True if hidden states are [B, L, d_model], False if [L, B, d_model]; so are
            memory and result. Neither layout is copied.
        content_bias, position_bias: None for new parameters, initially 0, or [H, D] parameters that
            layers share.
        backend: as in `rel_attention`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        *,
        attn_dropout: float = 0.0,
        causal: bool = True,
        window: Window = None,
        chunk: Chunk = None,
        clamp_len: int | None = None,
        batch_first: bool = True,
        content_bias: nn.Parameter | None = None,
        position_bias: nn.Parameter | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integer("d_model", d_model, 1, ">= 1")
        if d_model % 2:
            raise ValueError(f"d_model must be even (its sinusoids come in pairs), got {d_model}")
        options: dict[str, Any] = {
            "attn_dropout": attn_dropout, "causal": causal, "window": window, "chunk": chunk, "clamp_len": clamp_len,
            "batch_first": batch_first, "backend": backend, "device": device, "dtype": dtype,
        }  # fmt: skip
        super().__init__(d_model, n_head, d_head, **options)
        self.r = nn.Linear(d_model, self.n_head * self.d_head, bias=False, device=device, dtype=dtype)
        self.content_bias = self._bias("content_bias", content_bias)
        self.position_bias = self._bias("position_bias", position_bias)

    def _bias(self, name: str, shared: nn.Parameter | None) -> nn.Parameter:
        shape = (self.n_head, self.d_head)
        if shared is None:
            return nn.Parameter(torch.zeros(shape, device=self.qkv.weight.device, dtype=self.qkv.weight.dtype))
        if shared.shape != shape:
            raise ValueError(f"{name} must be [H, D] = {list(shape)}, got shape {list(shared.shape)}")
        return shared

    def reset_parameters(self) -> None:
        """Initialize the parameters: projections as `nn.Linear` does, biases to zero, including
        shared ones.

        Needed after `to_empty`, for example, which leaves them uninitialized.
        """
        for projection in (self.qkv, self.r, self.out):
            projection.reset_parameters()
        nn.init.zeros_(self.content_bias)
        nn.init.zeros_(self.position_bias)

    def biases(self) -> tuple[Tensor, Tensor]:
        """Return u and v of the paper, [H, D] each."""
        return self.content_bias, self.position_bias

    def project_positions(self, positions: Tensor) -> Tensor:
        """Return W_kR R: encodings [T, d_model] as a table [H, T, D], a view.

        Raises:
            ValueError: positions is not [T, d_model].
        """
        if positions.dim() != 2 or positions.size(-1) != self.d_model:
            raise ValueError(
                f"positions must be [T, d_model] with d_model={self.d_model}, the same for all of the batch, got shape "
                f"{list(positions.shape)}"
            )
        return project(self.r, positions).view(-1, self.n_head, self.d_head).transpose(0, 1)

    def positions(
        self, length: int, memory_len: int, clamp_len: int | None = None, *, like: Tensor | None = None
    ) -> Tensor:
        """Return the encodings [T, d_model] of every distance at which a query of the segment sees
        a key.

        Row 0 has distance 0, or -(length - 1) if the layer is not causal.

        length, memory_len: L and M.
        clamp_len: the largest distance; None for the layer's own `clamp_len`.
        like: hidden states, whose dtype and device the encodings have; None for those of the
        biases.
        """
        like = self.content_bias if like is None else like
        return sinusoid(self.distances(length, memory_len, clamp_len, like.device), self.d_model, like.dtype)
