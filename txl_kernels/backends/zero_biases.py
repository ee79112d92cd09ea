"""Zeros for the biases of calls that give none, for kernels that read them as tensors."""

from typing import Any

import torch
from torch import Tensor

from txl_kernels import torch_state
from txl_kernels.call import Call, changed, position_width_of

_MAX_ZEROS = 256
_stored: dict[Any, Tensor] = {}


def with_biases(call: Call) -> Call:
    """Return the call with zeros, [H, D] and [H, Dp] in q's dtype, in place of biases that are
    None."""
    if call.content_bias is None:
        call = changed(call, content_bias=_zeros(call.q, call.q.size(3)))
    if call.position_bias is None:
        call = changed(call, position_bias=_zeros(call.q, position_width_of(call)))
    return call


def _zeros(q: Tensor, width: int) -> Tensor:
    """Return zeros [H, width] in q's dtype.

    The tensor is kept for later calls, each of which would otherwise launch a kernel to fill it.
    Each CUDA stream has its own, because only work on one stream is ordered.
    """
    shape = (q.size(1), width)
    if not torch_state.is_plain() or not torch_state.ordinary(q):
        return q.new_zeros(shape)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    key = (shape, q.dtype, q.device, stream)
    zeros = _stored.get(key)
    if zeros is None:
        with torch.inference_mode(False):  # later calls may need gradients
            zeros = torch.zeros(shape, dtype=q.dtype, device=q.device)
        # While a CUDA graph is captured, nothing is written yet, and the memory belongs to the
        # graph.
        if not q.is_cuda or not torch.cuda.is_current_stream_capturing():
            if len(_stored) >= _MAX_ZEROS:
                _stored.clear()
            _stored[key] = zeros
    return zeros
