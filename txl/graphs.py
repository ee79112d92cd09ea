"""CUDA graphs of a model's steps: when they can be used, and their capture.

A graph holds the kernels of a step with their addresses. A replay launches them all at once, so a
GPU does not wait until Python has issued each operation.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from txl.model import Network
from txl.model.transformer import TransformerXL
from txl_kernels.linear import has_global_hook, has_hooks

log = logging.getLogger("txl")
OFF = "TXL_CUDA_GRAPHS"  # environment variable; "off": no graphs
WARM_UP = 8  # calls of one kind that run without a graph: they load kernels, and pay less than a capture
Result = TypeVar("Result")


def why_not(model: Network) -> str | None:
    """Return the reason why a model's steps cannot be captured in CUDA graphs, or None.

    Only modules whose code is known run in a graph: hooks, adapters, offload and quantized layers
    may do on the host what a replay would not repeat.
    """
    if os.environ.get(OFF, "on") == "off":
        return f"{OFF}=off"
    if not isinstance(model, TransformerXL):
        return f"the network is {type(model).__name__}, no TransformerXL"
    if len(model.softmax.bounds) > 2:
        return "the softmax has several bins, whose rows are counted on the host"
    for name, module in model.named_modules():
        place = type(module).__module__.split(".")
        if place[0] not in ("txl", "txl_kernels") and place[:3] != ["torch", "nn", "modules"]:
            return f"{name or 'the model'} is a {type(module).__module__}.{type(module).__qualname__}"
        if has_hooks(module) or "forward" in vars(module):
            return f"{name or 'the model'} has hooks, or another forward"
    if has_global_hook():
        return "a hook acts on all modules"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return "a parameter has hooks"
    kinds = {(type(p), p.device, p.dtype) for p in model.parameters()}
    if len(kinds) > 1 or next(iter(kinds))[0] is not nn.Parameter:
        return f"its parameters are of several devices, dtypes or classes: {sorted(map(str, kinds))}"
    return None


def is_capturable(device: torch.device) -> bool:
    """Whether kernels of this device can be captured."""
    return device.type == "cuda"


class Watch:
    """The reason why a model cannot run in graphs, looked for anew after a hook was registered
    anywhere, because a replay would not call it."""

    def __init__(self, model: Network) -> None:
        self._model = model
        self._hooks, self._reason = RemovableHandle.next_id, why_not(model)

    def why_not(self) -> str | None:
        """Return the reason why the model's steps cannot run in graphs now, or None."""
        if self._reason is not None or RemovableHandle.next_id != self._hooks:
            self._hooks, self._reason = RemovableHandle.next_id, why_not(self._model)
        return self._reason


class Addresses:
    """The addresses of a model's parameters, which its graphs read."""

    def __init__(self, model: nn.Module) -> None:
        self._own = [module._parameters for module in model.modules() if module._parameters]
        self._known = self._now()

    def _now(self) -> list[int]:
        return [p.data_ptr() for own in self._own for p in own.values() if p is not None]

    def have_changed(self) -> bool:
        """Whether a parameter was moved or replaced since this object was made."""
        return self._now() != self._known


def capture(
    function: Callable[..., Result], inputs: Sequence[Tensor], device: torch.device
) -> tuple[Result, Callable[[], None]]:
    """Capture the kernels that function(*inputs) launches, without running them.

    Returns: the function's result, whose tensors each replay writes again, and the replay.
    """
    graph, inference = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled()
    # The generator's state for graphs is made at the first capture; as inference tensors no other
    # mode could replay.
    captured = torch.cuda.graph(graph, capture_error_mode="thread_local")
    with torch.cuda.device(device), torch.inference_mode(False), captured, torch.inference_mode(inference):
        result = function(*inputs)
    return result, graph.replay


class Captured(Generic[Result]):
    """A captured function of static input tensors.

    Attributes:
        inputs: the tensors that the captured kernels read.
        result: the function's result, written again by each replay.
    """

    def __init__(self, function: Callable[..., Result], inputs: Sequence[Tensor]) -> None:
        """Capture function(*inputs); it is not run."""
        self.inputs = inputs
        self.result, self._replay = capture(function, inputs, inputs[0].device)

    def __call__(self, *inputs: Tensor) -> Result:
        """Copy the inputs to the static ones and replay the graph."""
        for own, given in zip(self.inputs, inputs, strict=True):
            if own is not given:
                own.copy_(given, non_blocking=True)
        self._replay()
        return self.result
