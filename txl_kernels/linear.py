"""Products of linear layers: in float32 without gradients by the library that is faster on this
processor; and when a layer's weight may be used without calling the layer.

torch multiplies float32 matrices by MKL, which on a Zen 5 reaches about 40% of the processor's
peak; oneDNN, which torch has for its other types, 75% to 90%.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from txl_kernels.checks import autocast_dtype
from txl_kernels.operators import is_plain, ordinary

_LEAST = 2**22  # multiply-adds of a call: below, oneDNN's own overhead is what counts
_FASTER = 1.4  # far from what is met: 2 on a Zen 5; where MKL is at home there is little to gain
_ROUNDS = 8
ALL = slice(None)  # outputs of a layer
_PLAIN = (nn.Parameter, Tensor, FakeTensor)
_MAX_SHAPES = 64  # oneDNN keeps 0.5 to 2.5 MiB for each number of rows of each weight, as long as the process lives
_shapes: set[tuple[int, int, int, bool]] = set()  # rows, in, out and whether there is a bias, that are oneDNN's


def _onednn() -> Any:
    """oneDNN's product (x, weight, bias, "none", [], "") for plain tensors; None where torch has no
    such operator."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@functools.cache
def onednn_gain() -> float:
    """The speed of oneDNN's float32 product relative to torch's own: short ones in turns, the
    best of each, measured once a process; 0 where torch has none."""
    product = _onednn()
    if product is None:
        return 0.0
    x, weight = (torch.full((n, 512), 0.5, dtype=torch.float32, device="cpu") for n in (128, 512))
    best = [float("inf")] * 2
    ways: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, weight), lambda: product(x, weight, None, "none", [], ""),
    ]  # fmt: skip
    for n in range(_ROUNDS + 1):
        for z, way in enumerate(ways):
            began = time.perf_counter()
            way()
            if n:  # the first prepares
                best[z] = min(best[z], time.perf_counter() - began)
    return best[0] / best[1]


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product of x [.., in] and weight [out, in] is oneDNN's."""
    return (
        not torch.is_grad_enabled()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() > 1
        and x.numel() * weight.size(0) >= _LEAST
        and x.size(-1) == weight.size(1)
        and is_plain()
        and ordinary(x, weight, bias)
        and weight.is_contiguous()
        and autocast_dtype("cpu") is None
        and bool(torch.backends.mkldnn.enabled)
        and not torch.are_deterministic_algorithms_enabled()
        and onednn_gain() >= _FASTER
        and _is_kept((x.numel() // x.size(-1), x.size(-1), weight.size(0), bias is not None))
    )


def _is_kept(shape: tuple[int, int, int, bool]) -> bool:
    """Whether oneDNN has prepared a shape of `_shapes`, or may: the first _MAX_SHAPES."""
    if shape not in _shapes and len(_shapes) < _MAX_SHAPES:
        _shapes.add(shape)
    return shape in _shapes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, errors too; [.., in] to [.., out].

    Without gradients a product of float32 on a CPU is oneDNN's, where that is measured to be
    faster: the same but for rounding, for the first 64 shapes that a process multiplies.
    `torch.use_deterministic_algorithms(True)` and `torch.backends.mkldnn.enabled = False` leave it
    to torch.
    """
    if not _by_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    product: Tensor = _onednn()(x, weight, bias, "none", [], "")
    return product


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of a module whose call is exactly `F.linear` by it; None for any other.

    Only such a weight may be sliced or multiplied by other means. Whatever wraps, replaces or
    watches a linear layer (LoRA, hooks, parametrizations, pruning, quantized layers and tensors,
    offloaded or sharded parameters) acts when the module is called, and is lost otherwise.
    """
    if (
        type(module) is not nn.Linear
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or getattr(module.forward, "__func__", None) is not nn.Linear.forward  # replaced on the instance
        or (not torch.compiler.is_compiling() and _has_any_global_hook())
    ):
        return None
    weight, bias = module.weight, module.bias
    plain = type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN)
    return weight if plain else None


def project(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) of a linear layer, by `linear` where that is the same."""
    if torch.is_grad_enabled() or not is_plain() or plain_weight(module) is None:
        projected: Tensor = module(x)
        return projected
    return linear(x, module.weight, module.bias)  # type: ignore[arg-type]


def project_parts(module: nn.Module, axis: int, *parts: tuple[Tensor, slice]) -> list[Tensor]:
    """Outputs of one linear layer for several inputs [.., in]: for each those that its slice names.

    By rows of the weight where that is the same as calling the layer. Else the layer is called
    once, with the inputs one behind the other along an axis, which is what hooks, adapters, offload
    and FSDP expect of a module in a forward.
    """
    weight = plain_weight(module)
    if weight is None:
        inputs = [x for x, _ in parts]
        together = module(torch.cat(inputs, axis) if len(inputs) > 1 else inputs[0])
        outputs = together.split([x.size(axis) for x in inputs], axis)
        return [y[..., rows] for y, (_, rows) in zip(outputs, parts, strict=True)]
    bias: Any = module.bias
    return [
        project(module, x) if rows == ALL else linear(x, weight[rows], None if bias is None else bias[rows])
        for x, rows in parts
    ]
