"""Attention layers whose table is computed from positions. `SegmentAttention` is their base;
`RelAttention`, the paper's layer, has sinusoids, their projection and the biases."""

import abc
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from txl_kernels.attention_layer import AttentionLayer, Terms
from txl_kernels.checks import Window, autocast_dtype, check_dense, check_integer
from txl_kernels.composed import Chunk
from txl_kernels.linear import project
from txl_kernels.torch_state import versions


def sinusoid(distances: Tensor, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sinusoidal encodings R [T, d_model] (paper, section 3.3; Vaswani et al. 2017); row
    t encodes distance d = distances[t].

    Row: [sin(d f_0), sin(d f_1), .. | cos(d f_0), cos(d f_1), ..] with f_c = 10000^(-2c / d_model).
    They are computed in float32 (float64 for float64), because bfloat16 holds integers exactly only
    up to 256.

    Args:
        distances: [T], integers or floats.
        d_model: width, even.
        dtype: dtype of the result.

    Raises:
        TypeError, ValueError: d_model is odd or not positive, or distances is no tensor of one
            axis.
    """
    if d_model <= 0 or d_model % 2:
        raise ValueError(f"d_model must be even and positive for sinusoidal encodings, got {d_model}")
    if not isinstance(distances, Tensor):
        got = type(distances).__name__
        raise TypeError(f"distances must be a tensor [T], got {got}; pass torch.arange(T) for distances from 0 on")
    if distances.dim() != 1:
        raise ValueError(f"distances must be one-dimensional, got shape {list(distances.shape)}")
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    inv_freq = 10000.0 ** -(torch.arange(0, d_model, 2, device=distances.device, dtype=exact) / d_model)
    angle = distances.to(exact).unsqueeze(1) * inv_freq
    return torch.cat([angle.sin(), angle.cos()], 1).to(dtype)


class SegmentAttention(AttentionLayer):
    """The base of attention layers whose positions are a table r, one vector for each distance.

    A subclass defines the table and the biases. The arguments are those of `RelAttention`.
    """

    shown = (*AttentionLayer.shown, "clamp_len")

    def __init__(
        self, d_model: int, n_head: int, d_head: int | None = None, *, clamp_len: int | None = None, **options: Any
    ) -> None:
        if clamp_len is not None:
            check_integer("clamp_len", clamp_len, 0, "None or >= 0")
        super().__init__(d_model, n_head, d_head, **options)
        self.clamp_len = clamp_len

    @abc.abstractmethod
    def positions(self, length: int, memory_len: int, *, like: Tensor | None = None) -> Tensor:
        """Return the argument of `project_positions`: positions [T, ..] for every distance at which
        a query of the segment sees a key.

        Row 0 has distance 0, or -(length - 1) if the layer is not causal.

        length, memory_len: L and M.
        like: hidden states, whose dtype and device the result has; None for those of the biases.
        """

    @abc.abstractmethod
    def project_positions(self, positions: Tensor) -> Tensor:
        """Return the table r, [H, T, kernel_width], of T positions."""

    @abc.abstractmethod
    def biases(self) -> tuple[Tensor, Tensor]:
        """Return content and position bias, [H, kernel_width] each."""

    @property
    def _like(self) -> Tensor:
        return self.biases()[0]

    def _terms(self, x: Tensor) -> Terms:
        return Terms(*self.biases())

    def _table(
        self, length: int, memory_len: int, positions: Tensor | None = None, *, like: Tensor
    ) -> tuple[Tensor, int]:
        if positions is None:
            positions = self.positions(length, memory_len, like=like)
        return self.project_positions(positions), 0 if self.causal else max(length - 1, 0)

    def distances(self, length: int, memory_len: int, device: torch.device) -> Tensor:
        """Return the distances at which queries of a segment see keys, int64 [T], clamped to
        +-clamp_len."""
        first = 0 if self.causal else -max(length - 1, 0)
        distances, limit = torch.arange(first, memory_len + length, device=device), self.clamp_len
        return distances if limit is None else distances.clamp(-limit, limit)

    def _cache_table(self, max_segment: int, mem_len: int, like: Tensor) -> tuple[Tensor | None, int]:
        if like.dtype != self._like.dtype and autocast_dtype(like.device.type) is None:
            raise TypeError(
                f"like must have the layer's dtype {self._like.dtype}, got {like.dtype}; or use torch.autocast"
            )
        r, zero_row = self._table(max_segment, mem_len, like=like)
        return r.contiguous(), zero_row

    def _table_state(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        return self._state_of(tuple(self.parameters()))

    def _state_of(self, parameters: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        return (self.clamp_len, *map(id, parameters), *versions(parameters)), parameters


class RelAttention(SegmentAttention):
    """Multi-head attention with relative positions and segment memory (paper, sections 3.2
    and 3.3).

    The layer has no residual connection, no layer norm and no dropout on the output.

    Args:
        d_model: width of the hidden states; even, because sinusoids come in pairs.
        n_head, d_head: number of heads H and their width D; d_head None for d_model // n_head.
        n_kv_head: number of heads of keys and values, a divisor of n_head: n_head / n_kv_head
            query heads share one, as in grouped-query attention (1: multi-query). None for n_head.
            Rows of r and the biases stay those of the n_head query heads.
        attn_dropout: probability of dropping an attention weight in training.
        causal, window, chunk: as in `rel_attention`.
        clamp_len: None, or the largest distance with an encoding of its own; greater ones share it.
        batch_first: True if hidden states are [B, L, d_model], False if [L, B, d_model]; so are
            memory and result. Neither layout is copied.
        bias: True if the projections of queries, keys, values and output have biases, as in
            Conformers, initialized as by `nn.Linear`. That of the encodings has none.
        content_bias, position_bias: None for new parameters, initially 0, or [H, D] parameters that
            layers share.
        backend: as in `rel_attention`.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.

    Example:
        >>> layer = RelAttention(d_model=64, n_head=4, window=32)
        >>> x, memory = torch.randn(2, 16, 64), torch.randn(2, 31, 64)  # batch first
        >>> layer(x, memory).shape
        torch.Size([2, 16, 64])
        >>> cache = layer.new_cache(batch=2, max_segment=16)
        >>> with torch.no_grad():
        ...     y = layer(x, cache=cache)  # evaluation: the cache grows by the segment
        >>> len(cache)
        16
    """

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
        clamp_len: int | None = None,
        batch_first: bool = True,
        bias: bool = False,
        content_bias: nn.Parameter | None = None,
        position_bias: nn.Parameter | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_integer("d_model", d_model, 1, "an integer >= 1")
        if d_model % 2:
            raise ValueError(f"d_model must be even (its sinusoids come in pairs), got {d_model}")
        options: dict[str, Any] = {
            "n_kv_head": n_kv_head, "attn_dropout": attn_dropout, "causal": causal, "window": window, "chunk": chunk,
            "clamp_len": clamp_len, "batch_first": batch_first, "bias": bias, "backend": backend, "device": device,
            "dtype": dtype, **unknown,
        }  # fmt: skip
        super().__init__(d_model, n_head, d_head, **options)
        self.r = nn.Linear(d_model, self.n_head * self.d_head, bias=False, device=device, dtype=dtype)
        self.content_bias = self._bias("content_bias", content_bias)
        self.position_bias = self._bias("position_bias", position_bias)

    def _bias(self, name: str, shared: nn.Parameter | None) -> nn.Parameter:
        shape = (self.n_head, self.d_head)
        if shared is None:
            return nn.Parameter(torch.zeros(shape, device=self.qkv.weight.device, dtype=self.qkv.weight.dtype))
        if not isinstance(shared, nn.Parameter):  # another tensor would be neither trained nor saved
            raise TypeError(f"{name} must be None or an nn.Parameter, got {type(shared).__name__}")
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

    def _table_state(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        r: Any = self._modules["r"]
        weight = r._parameters.get("weight")
        if type(r) is nn.Linear and weight is not None and r._parameters.get("bias") is None:
            return (self.clamp_len, id(weight), None if weight.is_inference() else weight._version), (weight,)
        return self._state_of(tuple(r.parameters()))

    def biases(self) -> tuple[Tensor, Tensor]:
        """Return u and v of the paper, [H, D] each."""
        return self.content_bias, self.position_bias

    def project_positions(self, positions: Tensor) -> Tensor:
        """Return W_kR R: encodings [T, d_model] as a table [H, T, D], a view.

        Raises:
            TypeError, ValueError: positions is no tensor [T, d_model].
        """
        check_dense("positions", positions, "encodings [T, d_model]")
        if positions.dim() != 2 or positions.size(-1) != self.d_model:
            raise ValueError(
                f"positions must be [T, d_model] with d_model={self.d_model}, the same for all of the batch, got shape "
                f"{list(positions.shape)}"
            )
        return project(self.r, positions).view(-1, self.n_head, self.d_head).transpose(0, 1)

    def positions(self, length: int, memory_len: int, *, like: Tensor | None = None) -> Tensor:
        """Return the encodings [T, d_model] of every distance at which a query of the segment sees
        a key.

        Row 0 has distance 0, or -(length - 1) if the layer is not causal.

        length, memory_len: L and M.
        like: hidden states, whose dtype and device the encodings have; None for those of the
        biases.
        """
        like = self.content_bias if like is None else like
        return sinusoid(self.distances(length, memory_len, like.device), self.d_model, like.dtype)
