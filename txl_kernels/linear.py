"""Linear layers: the float32 product without gradients, computed by the faster library on this
processor, and the rule for when a layer's weight may be used without calling the layer.

torch multiplies float32 matrices by MKL. oneDNN, which torch uses for other types, is twice as fast
on a Zen 5 and 1.1 times as fast on a Zen 4, but not on Intel processors (docs/log.md).
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules

from txl_kernels.checks import autocast_dtype
from txl_kernels.torch_state import is_plain, ordinary

_MIN_MULTIPLY_ADDS = 2**22  # multiply-adds of a call; below, oneDNN's overhead outweighs its gain
ALL = slice(None)  # slice of all outputs of a layer
_PLAIN = (nn.Parameter, Tensor, FakeTensor)
_MAX_SHAPES = 64  # oneDNN keeps 0.5 to 2.5 MiB for each weight and number of rows until the process ends
_shapes: set[tuple[int, int, int, bool]] = set()  # (rows, in, out, has bias) of products that oneDNN computes


def _onednn() -> Any:
    """Return oneDNN's product (x, weight, bias, "none", [], ""), or None if torch has no such
    operator."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether torch has oneDNN's product and the processor is AMD's, as Linux says."""
    try:
        return _onednn() is not None and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes the product of x [.., in] and weight [out, in]."""
    return (
        not torch.is_grad_enabled()
        and is_plain()  # before sizes, which may be symbols
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.dim() > 1
        and x.numel() * weight.size(0) >= _MIN_MULTIPLY_ADDS
        and x.size(-1) == weight.size(1)
        and ordinary(x, weight, bias)
        and weight.is_contiguous()
        and autocast_dtype("cpu") is None
        and bool(torch.backends.mkldnn.enabled)
        and not torch.are_deterministic_algorithms_enabled()
        and onednn_is_faster()
        and _is_kept((x.numel() // x.size(-1), x.size(-1), weight.size(0), bias is not None))
    )


def _is_kept(shape: tuple[int, int, int, bool]) -> bool:
    """Whether a shape is among the first _MAX_SHAPES, which oneDNN may prepare; records a new
    one."""
    if shape not in _shapes and len(_shapes) < _MAX_SHAPES:
        _shapes.add(shape)
    return shape in _shapes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.linear(x, weight, bias)`, [.., in] to [.., out], with its errors.

    Without gradients, oneDNN computes float32 products on AMD processors: equal except for
    rounding, for the first 64 shapes of a process.
    `torch.use_deterministic_algorithms(True)` or `torch.backends.mkldnn.enabled = False` leaves
    them to torch.
    """
    if not _by_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    product: Tensor = _onednn()(x, weight, bias, "none", [], "")
    return product


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook acts on the calls of a module, or on its gradients."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks or module._backward_hooks or module._backward_pre_hooks)


def has_global_hook() -> bool:
    """Whether a hook acts on the calls of all modules (torch 2.6 has no function for it)."""
    hooks = modules._global_forward_hooks or modules._global_forward_pre_hooks
    return bool(hooks or modules._global_backward_hooks or modules._global_backward_pre_hooks)


def plain_weight(module: nn.Module) -> Tensor | None:
    """Return the weight [out, in] of a module whose call is exactly `F.linear` by it; None for any
    other module.

    Only such a weight may be sliced or multiplied without calling the module. LoRA, hooks,
    parametrizations, pruning, quantized layers and tensors, and offloaded or sharded parameters
    take effect when the module is called, and would be lost.
    """
    if (
        type(module) is not nn.Linear
        or has_hooks(module)
        or getattr(module.forward, "__func__", None) is not nn.Linear.forward  # forward is replaced on the instance
        or (not torch.compiler.is_compiling() and has_global_hook())
    ):
        return None
    weight, bias = module.weight, module.bias
    plain = type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN)
    return weight if plain else None


def project(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x) of a linear layer, computed by `linear` if that gives the same and may be
    faster."""
    if (
        torch.is_grad_enabled()
        or not is_plain()  # first: a size may be a symbol
        or x.numel() * getattr(module, "out_features", 0) < _MIN_MULTIPLY_ADDS
        or plain_weight(module) is None
    ):
        projected: Tensor = module(x)
        return projected
    return linear(x, module.weight, module.bias)  # type: ignore[arg-type]


def project_parts(module: nn.Module, axis: int, *parts: tuple[Tensor, slice]) -> list[Tensor]:
    """Return the outputs of one linear layer for several inputs [.., in], each with the slice of
    the outputs that it needs.

    If `plain_weight` allows it, each input is multiplied by its rows of the weight. Else the layer
    is called once, for the inputs concatenated along `axis`, because hooks, adapters, offload and
    FSDP expect one call of a module in a forward.
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
