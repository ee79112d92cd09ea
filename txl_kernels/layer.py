"""`RelAttention`: a Transformer-XL attention layer that owns its projections and biases."""

from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.call.span import Window
from txl_kernels.checks.settings import check_integer
from txl_kernels.forms import Chunk
from txl_kernels.positions import sinusoid
from txl_kernels.segment_attention import SegmentAttention


class RelAttention(SegmentAttention):
    """Multi-head attention with relative positions and segment memory (paper, sections 3.2
    and 3.3).

    Only the attention: no residual, no layer norm, no dropout on the output.

    Args:
        d_model: width of the hidden states; even (the encodings are sinusoids).
        n_head, d_head: heads and their width; d_head None for d_model // n_head.
        attn_dropout: dropout on the attention weights in training.
        causal, window, chunk: as in `rel_attention`.
        clamp_len: None, or the largest distance told apart from longer ones.
        batch_first: True for [B, L, d_model], False for [L, B, d_model]; memory and result alike.
            Neither is copied.
        content_bias, position_bias: None for biases of its own (zeros), or [H, D] parameters shared
            between layers.
        backend: as in `rel_attention`.

    Raises:
        TypeError, ValueError: an argument, by name.
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
        """Initial values: projections as `nn.Linear` draws them, biases of zero, shared ones too.

        After `to_empty`, say, which leaves memory as it was.
        """
        for projection in (self.qkv, self.r, self.out):
            projection.reset_parameters()
        nn.init.zeros_(self.content_bias)
        nn.init.zeros_(self.position_bias)

    def biases(self) -> tuple[Tensor, Tensor]:
        """u and v of the paper, [H, D] each."""
        return self.content_bias, self.position_bias

    def project_positions(self, positions: Tensor) -> Tensor:
        """W_kR R: encodings [T, d_model] -> [H, T, D], a view.

        Raises:
            ValueError: positions is of another shape.
        """
        if positions.dim() != 2 or positions.size(-1) != self.d_model:
            raise ValueError(
                f"positions must be [T, d_model] with d_model={self.d_model}, the same for all of the batch, got shape "
                f"{list(positions.shape)}"
            )
        projected: Tensor = self.r(positions)
        return projected.view(-1, self.n_head, self.d_head).transpose(0, 1)

    def positions(self, length: int, memory_len: int, clamp_len: int | None = None) -> Tensor:
        """Encodings [T, d_model] of every distance a segment of this length meets, the first row's
        distance 0 or -(length - 1).

        clamp_len: None for the layer's own.
        """
        weight = self.r.weight
        distances = self.distances(length, memory_len, clamp_len, weight.device)
        return sinusoid(distances, self.d_model, weight.dtype)
