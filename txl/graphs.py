"""CUDA graphs of a model's steps: when they can be used, their capture, and what ends them.

A graph holds the kernels of a step with their addresses. A replay launches them all at once, so a
GPU does not wait until Python has issued each operation. It must give what Python would have given,
so before each replay everything that Python would have read is compared with what it was at the
capture (`Watch`, `settings`).
"""

import logging
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from txl.model import Network
from txl.model.transformer import TransformerXL
from txl_kernels.backends.triton.config import kind_of
from txl_kernels.linear import has_global_hook, has_hooks
from txl_kernels.torch_state import is_plain

log = logging.getLogger("txl")
OFF = "TXL_CUDA_GRAPHS"  # environment variable; "off": no graphs
WARM_UP = 8  # calls of one kind that run without a graph: they load kernels, and pay less than a capture
MAX_DROPS = 3  # how often the graphs of a model are captured again because something they hold was changed
_capturing = threading.Lock()  # torch captures one graph at a time in a process
_pool: ContextVar[list[Any] | None] = ContextVar("_pool", default=None)  # of `sharing_memory`
# Hooks of saved tensors that are active; torch 2.6 does not tell.
_saving: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
# Modules whose forward reads their children and parameters alone.
_WITHOUT_ATTRIBUTES = (nn.Linear, nn.Identity, nn.Sequential, nn.ModuleList, nn.ParameterList, nn.ParameterDict)
Result = TypeVar("Result")


def why_not(model: Network) -> str | None:
    """Return the reason why a model's steps cannot be captured in CUDA graphs, or None.

    Only modules whose code is known run in a graph: hooks, adapters, offload and quantized layers
    may do on the host what a replay would not repeat.
    """
    if os.environ.get(OFF, "on") == "off":
        return f"{OFF}=off"
    if torch.version.hip is not None:
        return "torch is built for ROCm, where none has run yet"
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


def settings(device: torch.device) -> Hashable:
    """Return torch's settings that decide which kernels a step launches: a part of each graph's
    key. None while something is active that acts on the operations that Python issues, so that a
    step must run without a graph: autocast around it, a tracer, transform or dispatch mode, anomaly
    detection, hooks of saved tensors."""
    if (
        not is_plain()
        or torch.is_autocast_enabled(device.type)
        or torch.is_anomaly_enabled()
        or _saving(False) is not None
    ):
        return None
    cuda = torch.backends.cuda
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_deterministic_debug_mode(),
        kind_of(torch.float32), cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


class Watch:
    """The state of a model, and of the optimizer that trains it, that a captured step holds.

    It consists of the modules with their classes and attributes (rates, windows, training mode,
    hooks), parameters and buffers, the optimizer's state and options, and `others`. Plain values
    are compared by value, modules and tensors by identity, tensors also by address, strides and
    requires_grad.

    Args:
        others: returns further modules and tensors, and further values.
    """

    def __init__(
        self,
        model: Network,
        optimizer: Optimizer | None = None,
        others: Callable[[], tuple[list[Any], list[Any]]] = lambda: ([], []),
    ) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._hooks = RemovableHandle.next_id
        self._reason: str | None = None
        self._remember()

    def why_not(self) -> str | None:
        """Return the reason why the model's steps cannot run in graphs now, or None. It is looked
        for anew after a hook was registered anywhere, because a replay would not call it."""
        if self._reason is not None or RemovableHandle.next_id != self._hooks:
            self._hooks = RemovableHandle.next_id
            if self._reason is not None or self._optimizer_has_hooks() or _have_hooks(self._modules, self._parameters):
                self._reason = self._look()
        return self._reason

    def _look(self) -> str | None:
        return "the optimizer has hooks, or another step" if self._optimizer_has_hooks() else why_not(self._model)

    def _optimizer_has_hooks(self) -> bool:
        own = self._optimizer
        if own is None:
            return False
        hooks = own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks or "step" in vars(own)
        return bool(hooks or optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks)

    def changed(self) -> bool:
        """Whether anything has changed since the last call, or since this object was made."""
        try:
            objects, values = self._objects(), self._values()
            same = len(objects) == len(self._kept) and all(map(operator.is_, objects, self._kept))
            same = same and bool(values == self._known)
        except (KeyError, RuntimeError, ValueError):  # something is gone, or a value is a tensor or an array
            same = False
        if not same:
            self._remember()
        return not same

    def _remember(self) -> None:
        self._reason = self._look()
        self._modules, self._parameters = list(self._model.modules()), list(self._model.parameters())
        self._classes = {type(module) for module in self._modules}
        # Dictionaries, and places in them: of children, and of attributes that a forward may read.
        children: list[dict[str, Any]] = [
            x for m in self._modules for x in (m._modules, m._parameters, m._buffers) if x
        ]
        self._sizes = [*map(vars, self._modules), *children]
        self._children = [(x, name) for x in children for name in x]
        own = [vars(module) for module in self._modules if type(module) not in _WITHOUT_ATTRIBUTES]
        internal = vars(nn.Module()).keys() - {"training"}
        self._attributes = [(x, name) for x in own for name in x if name not in internal]
        self._tensors = [*self._parameters, *self._model.buffers()]
        if self._optimizer is not None:
            states = [x for state in self._optimizer.state.values() for x in state.values()]
            self._tensors += [x for x in states if isinstance(x, Tensor)]
        self._matrices = [x for x in self._tensors if x.dim() > 1]
        self._kept, self._known = self._objects(), self._values()

    def _objects(self) -> list[Any]:
        """Return what is compared by identity."""
        objects = [x[name] for x, name in self._children]
        objects += self._others()[0]
        if self._optimizer is not None:
            objects += chain.from_iterable(map(dict.values, self._optimizer.state.values()))
            for group in self._optimizer.param_groups:
                objects += [*group["params"], group["lr"]]
        return objects

    def _values(self) -> list[Any]:
        """Return what is compared by value."""
        values = [x[name] for x, name in self._attributes]
        values += map(len, self._sizes)
        values += map(type, self._modules)
        values += [kind.forward for kind in self._classes]
        values += map(Tensor.data_ptr, self._tensors)
        values += map(Tensor.stride, self._matrices)
        values += self._others()[1]
        if self._optimizer is not None:
            values += [type(self._optimizer), "step" in vars(self._optimizer)]
            values += [x.requires_grad for x in self._parameters]
            for group in self._optimizer.param_groups:
                values += [(name, x) for name, x in group.items() if name not in ("params", "lr")]
        return values


def _have_hooks(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether hooks act on modules, on parameters, or on all modules of the process."""
    return (
        has_global_hook()
        or any(map(has_hooks, modules))
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    )


@contextmanager
def sharing_memory(pool: list[Any]) -> Iterator[None]:
    """A context in which captured graphs use one memory pool, since they never run at the same
    time; its handle is the first element of `pool`, once there is one."""
    token = _pool.set(pool)
    try:
        yield
    finally:
        _pool.reset(token)


def capture(
    function: Callable[..., Result], inputs: Sequence[Tensor], device: torch.device
) -> tuple[Result, Callable[[], None]]:
    """Capture the kernels that function(*inputs) launches, without running them.

    Returns: the function's result, whose tensors each replay writes again, and the replay.

    Raises:
        Exception: the function's, or torch's if something cannot be captured or memory is short.
            The current stream is what it was.
    """
    graph, inference, pool = torch.cuda.CUDAGraph(), torch.is_inference_mode_enabled(), _pool.get()
    # The generator's state for graphs is made at the first capture; as inference tensors no other
    # mode could replay.
    with _capturing, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream()):
        if pool == []:
            pool.append(torch.cuda.graph_pool_handle())
        captured = torch.cuda.graph(graph, pool=pool[0] if pool else None, capture_error_mode="thread_local")
        with torch.inference_mode(False), captured, torch.inference_mode(inference):
            result = function(*inputs)
    return result, graph.replay


def reserved_memory(device: torch.device) -> int:
    """Return the bytes of a device's memory that torch has taken; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def is_short_of_memory(device: torch.device, nbytes: int) -> bool:
    """Whether a device has less memory left for steps without graphs than `nbytes`, which graphs of
    such steps keep."""
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - nbytes
    return torch.cuda.mem_get_info(device)[0] + max(unused, 0) < nbytes


class Captured(Generic[Result]):
    """A captured function of static input tensors.

    Attributes:
        inputs: the tensors that the captured kernels read.
        result: the function's result, written again by each replay.
        replay: replays the graph.
    """

    def __init__(self, function: Callable[..., Result], inputs: Sequence[Tensor]) -> None:
        """Capture function(*inputs); it is not run."""
        self.inputs = inputs
        self.result, self.replay = capture(function, inputs, inputs[0].device)

    def __call__(self, *inputs: Tensor) -> Result:
        """Copy the inputs, of the static ones' shapes and dtypes, to these, and replay the
        graph."""
        for own, given in zip(self.inputs, inputs, strict=True):
            if own is not given:
                own.copy_(given, non_blocking=True)
        self.replay()
        return self.result


class Steps:
    """The decision whether a step of a model runs in a graph, and the count that precedes it.

    The first WARM_UP steps of a kind run without a graph. If what the graphs hold has changed, they
    are dropped and the warm-up begins again; after MAX_DROPS times, and after an error in a
    capture, all steps run without graphs.

    Args:
        what: the name of the steps in messages of the log.
        watch: the state that graphs hold.
        drop: drops the graphs; returns whether there were any.
    """

    def __init__(self, what: str, watch: Watch, drop: Callable[[], bool]) -> None:
        self._what, self._watch, self._drop = what, watch, drop
        self._seen: Counter[Hashable] = Counter()
        self._drops = 0
        self._off = False

    def kind(self, function: str, inputs: Sequence[Tensor], device: torch.device) -> Hashable:
        """Return the kind of a step that may run in a graph: its function, settings of torch, and
        shapes and dtypes of the inputs. None for a step that runs without a graph."""
        if self._off or any(x.device != device for x in inputs):
            return None
        found = settings(device)
        if found is None:
            return None
        if self._watch.changed():
            self.restart()
            if self._drop():
                self._drops += 1
                if self._drops > MAX_DROPS:
                    self.turn_off("the model was changed too often")
                    return None
        if self._watch.why_not() is not None:
            return None
        kind = function, found, *((x.shape, x.dtype) for x in inputs)
        self._seen[kind] += 1
        return kind if self._seen[kind] > WARM_UP else None

    def restart(self) -> None:
        """Begin the warm-up again."""
        self._seen.clear()

    def turn_off(self, reason: object) -> None:
        """Run all later steps without graphs, and log the reason."""
        self._off = True
        self._drop()
        log.warning("%s goes on without CUDA graphs: %s", self._what, reason)
