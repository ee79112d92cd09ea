"""The one way to kernels: launches that are laid out once and repeated at other addresses.

At first a launch goes through Triton's `JITFunction`, which at every call looks up what it compiled
for these types, pointers and integers that are multiples of 16, and integers that are 1. Whoever
keeps a `Launch` uses it for calls alike in all of this, so from then on it goes straight to what
was compiled.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton.operands import Operand, Tile, Workspace
from txl_kernels.backends.triton.plan import on_device


class _Described(TensorDescriptor):  # type: ignore[misc]
    """A descriptor without its checks, which it passed at another address; and, as launchers ask no
    more of that, its own tensor."""

    def __init__(self, shape: list[int], strides: list[int], block: list[int], address: int) -> None:
        self.shape, self.strides, self.block_shape, self._address = shape, strides, block, address

    @property
    def base(self) -> "_Described":
        return self

    def data_ptr(self) -> int:
        return self._address


def _somebody_listens() -> bool:
    """Whether a profiler has hooks at launches."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(x is not None and getattr(x, "calls", True) for x in hooks)


class Launch:
    """A kernel, its grid, and its arguments by name, Triton's options among them.

    `Operand` and `Tile` stand for tensors. Nothing changes once it is known what was compiled.
    """

    def __init__(self, function: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.function, self.grid = function, (*grid, 1, 1)[:3]
        self._values = [arguments.pop(name) for name in function.arg_names]
        # As the tables of compiled kernels were made; Triton's own default is to change.
        self._options = {"enable_fp_fusion": True, **arguments}
        self._pointers, self._tiles = [], []
        for at, x in enumerate(self._values):
            if isinstance(x, Operand):
                self._pointers.append((at, x.n, x.offset))
            elif isinstance(x, Tile):
                n, (shape, strides, *_), _ = x.operand
                self._tiles.append((at, n, x.operand.offset, [*shape], [*strides], [*x.block]))
        self._compiled: Any = None

    @property
    def repeats(self) -> bool:
        """Whether it can be repeated: not in the interpreter, nor where a hook wants each call."""
        return self._compiled is not None and not self.function.pre_run_hooks

    def first(self, tensors: Sequence[Tensor | None]) -> None:
        """Through Triton's front."""
        values = [x.of(tensors) if isinstance(x, (Operand, Tile)) else x for x in self._values]
        compiled = self.function[self.grid](*values, **self._options)
        if isinstance(compiled, CompiledKernel) and knobs.runtime.add_stages_inspection_hook is None:
            self._compiled = compiled

    def again(self, addresses: list[int], stream: int, told: bool) -> None:
        """As the front launches what it has found. Integers are pointers to a launcher, too.

        told: launch hooks are, with what Triton says of a launch, which takes a while to say.
        """
        values = self._values.copy()
        for at, n, offset in self._pointers:
            values[at] = addresses[n] + offset
        for at, n, offset, shape, strides, block in self._tiles:
            values[at] = _Described(shape, strides, block, addresses[n] + offset)
        x = self._compiled
        if told:
            x[self.grid](*values, stream=stream)
        else:
            x.run(*self.grid, stream, x.function, x.packed_metadata, None, None, None, *values)


class Launches:
    """All kernels of a call, in order. workspace: tensors that only they use."""

    def __init__(self, launches: Sequence[Launch], workspace: Workspace) -> None:
        self.launches, self.workspace = tuple(launches), workspace

    def run(self, device: torch.device, tensors: list[Tensor | None], addresses: list[int]) -> None:
        """On the current stream. Both lists get what lies in the workspace, too."""
        memory = self.workspace.allocate(device)
        addresses += self.workspace.addresses(memory)
        with on_device(device):
            if all(x.repeats for x in self.launches):
                stream = driver.active.get_current_stream(driver.active.get_current_device())
                told = _somebody_listens()
                for launch in self.launches:
                    launch.again(addresses, stream, told)
            else:
                tensors += self.workspace.views(memory)
                for launch in self.launches:
                    launch.first(tensors)
