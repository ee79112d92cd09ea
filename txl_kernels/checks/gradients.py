"""What a kernel's backward gets beside the call."""

import torch
from torch import Tensor

from txl_kernels.call import Call


def check_gradients(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Checks them; returns dout and dlse as kernels read them.

    That is dout in q's dtype with a contiguous last axis, dlse contiguous and float32.

    Raises:
        ValueError: a shape or a device, by name, or results that the forward operator did not
            return.
    """
    for name, x, shape in (
        ("out", out, call.q.shape),
        ("dout", dout, call.q.shape),
        ("lse", lse, call.q.shape[:3]),
        ("dlse", dlse, call.q.shape[:3]),
    ):
        if x is not None and (x.shape != shape or x.device != call.q.device):
            raise ValueError(f"{name} must be {list(shape)} on {call.q.device}, got {list(x.shape)} on {x.device}")
    rows = out.size(-1) <= 1 or out.stride(-1) == 1
    if out.dtype != call.q.dtype or not rows or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError("out and lse must be as the forward operator returned them")
    dout = dout.to(call.q.dtype)
    if dout.size(-1) > 1 and dout.stride(-1) != 1:
        dout = dout.contiguous()
    return dout, None if dlse is None else dlse.float().contiguous()
