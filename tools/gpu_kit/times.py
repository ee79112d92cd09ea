"""Microseconds of every kernel of ours, beside plain SDPA by torch's flash (FA2) and cuDNN
backends, and beside the flash kernel in Triton that the model of clocks was fitted to."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from gpu_kit import cases, yardstick
from gpu_kit.measure import device, measure
from gpu_kit.records import Items
from gpu_kit.work import Work, both, choices, forward, tensors
from txl_kernels.backends import triton

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class OtherPairs(Exception):
    """A backend that masks something else."""


def lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries are the last of the keys' positions: the pairs that ours computes."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.size(2), k.size(2)))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many pairs without a mask: with the memory and half of the segment for keys."""
    keys = k.size(2) - q.size(2) // 2
    return F.scaled_dot_product_attention(q, k[:, :, :keys], v[:, :, :keys])


PLAIN: dict[str, tuple[SDPBackend, Attention]] = {
    "flash SDPA": (SDPBackend.FLASH_ATTENTION, lower_right),
    "flash SDPA, unmasked": (SDPBackend.FLASH_ATTENTION, unmasked),
    "cuDNN SDPA": (SDPBackend.CUDNN_ATTENTION, causal),
    "cuDNN SDPA, unmasked": (SDPBackend.CUDNN_ATTENTION, unmasked),
}


def ours(work: Work) -> dict[str, Any]:
    """Forward without gradients, and forward with backward."""
    x = tensors(work, device())
    with choices(work):
        found = {"forward": measure(lambda: both(replace(work, backward=False), x))}
        if work.backward:
            found["forward+backward"] = measure(lambda: both(work, x))
    return {"work": asdict(work), **found}


def plain(work: Work, backend: SDPBackend, attention: Attention) -> dict[str, Any]:
    """Without positions and biases. Raises OtherPairs."""
    with sdpa_kernel(backend):
        if attention is not unmasked:
            _require_pairs(attention, work.D)
        x = tensors(work, device())
        k, v = (torch.cat([x[f"{name}_mem"], x[name]], 2) for name in "kv")
        given = [t.requires_grad_() for t in (x["q"], k, v)]
        with torch.no_grad():
            found = {"forward": measure(lambda: attention(*given))}
        found["forward+backward"] = measure(lambda: torch.autograd.grad(attention(*given), given, x["dout"]))
    return {"work": asdict(work), **found}


def _require_pairs(attention: Attention, width: int) -> None:
    length, keys = 64, 192
    q, k, v = (torch.randn(1, 2, n, width, device=device(), dtype=torch.bfloat16) for n in (length, keys, keys))
    seen = torch.ones(length, keys, dtype=torch.bool, device=device()).tril(keys - length)
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen)
    error = float((attention(q, k, v).double() - want).norm() / want.norm())
    if not error < 2e-2:
        raise OtherPairs(f"its values differ by {error:.2g} from attention over the visible pairs")


def decode(work: Work) -> dict[str, Any]:
    """One query; bytes are those of the keys, the values and r, once."""
    x = tensors(work, device())
    keys = work.M + work.L
    read = 2 * work.D * work.H * keys * (2 * work.B + 1)
    with torch.no_grad():
        found = measure(lambda: forward(work, x))
    if "kernels" in found:
        found["gb_per_s"] = read / sum(found["kernels"].values()) / 1e3
    return {"work": asdict(work), "bytes": read, "forward": found}


def flash_in_triton(width: int) -> dict[str, Any]:
    work = yardstick.case(width)
    return {"work": asdict(work), "tiles": yardstick.TILES, "forward": measure(yardstick.flash(work, device()))}


def named(work: Work) -> str:
    return f"{work.name}, B{work.B} H{work.H} L{work.L} M{work.M} D{work.D}"


def items() -> Items:
    if triton.interpreted():
        work = replace(next(cases.timed()), B=1, H=1, L=32, M=32, D=16)
        yield named(work), partial(ours, work)
        other = replace(work, name="flash SDPA")
        yield named(other), partial(plain, other, SDPBackend.MATH, lower_right)
        return
    everything = list(cases.timed())
    for length in cases.LENGTHS:
        for width in cases.WIDTHS:
            same = [w for w in everything if (length, width) == (w.L, w.D)]
            for work in same:
                yield named(work), partial(ours, work)
            for name, (backend, attention) in PLAIN.items():
                work = replace(same[0], name=name)
                yield named(work), partial(plain, work, backend, attention)
        if length == cases.LENGTHS[0]:
            for width in cases.WIDTHS:
                work = yardstick.case(width)
                yield f"{work.name}, D{width}", partial(flash_in_triton, width)
            for work in cases.decoding():
                yield named(work), partial(decode, work)
