"""Contexts in which the `triton` backend accepts CPU tensors as if they were on a GPU: its calls
are planned, or also compiled, or launched up to the driver, and nothing runs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from txl_kernels.backends import triton as backend
from txl_kernels.backends.triton import passes, plan
from txl_kernels.backends.triton.config import Capability

# Takes the place of a launch. Arguments: the kernel's function, the compiled kernel, the grid, and
# the arguments by name.
Launch = Callable[[JITFunction, Any, tuple[int, ...], dict[str, Any]], object]


def capability_of(gpu: int | str) -> Capability:
    """Return a GPU's capability as `config` takes it. gpu: such as 80 or 90, or "gfx942"."""
    return gpu if isinstance(gpu, str) else divmod(gpu, 10)


@contextlib.contextmanager
def pretended_gpu(capability: int | str, multiprocessors: int) -> Iterator[None]:
    """A context in which launches are planned for a GPU. Plans are not cached beyond it.

    capability: such as 80 or 90; or the architecture of an AMD GPU, such as "gfx942", for which
    torch is taken for a ROCm build.
    """
    patch = mock.patch.object
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch(backend, "_why_not_device", return_value=None))
        stack.enter_context(patch(plan, "capability", lambda device: capability_of(capability)))
        if isinstance(capability, str):
            stack.enter_context(patch(torch.version, "hip", "7.0"))
        for module in (plan, passes):
            stack.enter_context(patch(module, "multiprocessors", lambda device: multiprocessors))
        plan.clear_layouts()
        stack.callback(plan.clear_layouts)
        yield


class _Driver:
    """The part of a Triton driver that compiles kernels, and makes the launchers of Triton 3.6."""

    first_device = 1000  # Triton keeps compiled kernels by device
    launcher_cls = nvidia.CudaLauncher
    utils = SimpleNamespace(
        # returns module, function, registers, spills, maximum threads
        load_binary=lambda name, *rest: (1, name, 0, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        unload_module=lambda module: None,
    )

    def __init__(self, capability: int | str) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        number = int(self.capability[3:], 16) if isinstance(self.capability, str) else self.capability
        return self.first_device + number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        if isinstance(self.capability, str):
            return GPUTarget("hip", self.capability, 64 if self.capability.startswith("gfx9") else 32)
        return GPUTarget("cuda", self.capability, 32)


@contextlib.contextmanager
def compiling(capability: int | str, launch: Launch, multiprocessors: int = 132) -> Iterator[None]:
    """A context as `pretended_gpu`, in which a launch compiles its kernel and calls `launch`
    instead."""
    run = JITFunction.run

    def compile_only(function: JITFunction, *, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> None:
        launch(function, run(function, grid=grid, warmup=True, **arguments), grid, arguments)

    patch = mock.patch.object
    with (
        patch(triton.runtime.driver, "_active", _Driver(capability)),
        patch(JITFunction, "run", compile_only),
        pretended_gpu(capability, multiprocessors),
    ):
        yield


class Chosen(CompiledKernel):  # type: ignore[misc]
    """A kernel that Triton has chosen by the arguments of a launch. It is not compiled; `run` calls
    a function instead, with itself and the arguments."""

    def __init__(self, name: str, key: str, launch: Callable[..., object]) -> None:
        self.name, self.function, self.packed_metadata = name, key, len(key)
        self.metadata = SimpleNamespace(target=triton.runtime.driver.active.get_current_target(), name=name)
        self._launch = functools.partial(launch, self)

    def __del__(self) -> None:
        """Do nothing: no module was loaded."""

    @property
    def run(self) -> Any:
        return self._launch

    def launch_metadata(self, grid: Any, stream: int, *arguments: Any) -> Any:
        """Return what hooks of launches get, as Triton does."""
        return {"name": self.name} if triton.knobs.runtime.launch_enter_hook.calls else None


@contextlib.contextmanager
def launching(capability: int | str, launch: Callable[..., object], multiprocessors: int = 132) -> Iterator[None]:
    """A context as `pretended_gpu`, in which Triton binds and specializes arguments and chooses
    kernels as on a GPU, and `launch` is called with the kernel (`Chosen`) and what its `run` is
    called with."""

    class Driver(_Driver):
        first_device = 2000

    def choose(function: Any, key: str, signature: Any, device: int, *others: Any) -> Chosen:
        kernel = function.device_caches[device][0][key] = Chosen(function.__name__, key, launch)
        return kernel

    patch = mock.patch.object
    with (
        patch(triton.runtime.driver, "_active", Driver(capability)),
        patch(JITFunction, "_do_compile", choose),
        pretended_gpu(capability, multiprocessors),
    ):
        yield
