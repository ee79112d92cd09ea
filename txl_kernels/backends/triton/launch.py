"""The one way to kernels: launches that are laid out once and repeated at other addresses.

At first a launch goes through Triton's `JITFunction`, which at every call looks up what it compiled
for these types, pointers and integers that are multiples of 16, and integers that are 1. Whoever
keeps a `Launch` uses it for calls alike in all of this, so from then on it goes straight to what
was compiled. Operands stand for tensors in launches that are laid out before there are any.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton import config

# Bytes. Triton compiles anew for pointers that are no multiples, and descriptors need them.
ALIGNMENT = 16
PART = 256  # bytes, of which a part of the workspace starts at a multiple


class Form(NamedTuple):
    """A tensor without its values and its place."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    misaligned: int = 0  # bytes past a multiple of ALIGNMENT


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Addresses of tensors, 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def forms_of(tensors: Sequence[Tensor | None], addresses: list[int]) -> tuple[Any, ...]:
    """Of each the fields of its `Form`, as a tuple, which is made faster; None for None."""
    pairs = zip(tensors, addresses, strict=True)
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, at % ALIGNMENT) for x, at in pairs])


def environment_of(dtype: torch.dtype) -> tuple[Any, ...]:
    """How products are formed, and with which settings Triton compiles."""
    casts = getattr(knobs.compilation, "fpsan_homomorphic_casts", None)  # newer than 3.6
    compilation = knobs.compilation.instrumentation_mode, casts, knobs.runtime.add_stages_inspection_hook
    return (config.kind_of(dtype), knobs.runtime.debug, *compilation)


class Operand(NamedTuple):
    """A tensor of a launch: number `n` of its call's, from row `first` on."""

    n: int
    form: Form
    first: int = 0

    @property
    def offset(self) -> int:
        """Bytes from the tensor's address."""
        return self.first * self.form.strides[-2] * self.form.dtype.itemsize if self.first else 0

    def rows(self, first: int, past: int) -> "Operand":
        """Its rows [first, past), of the last axis but one."""
        shape, strides, dtype, misaligned = self.form
        shape = (*shape[:-2], past - first, shape[-1])
        misaligned = (misaligned + first * strides[-2] * dtype.itemsize) % ALIGNMENT
        return Operand(self.n, Form(shape, strides, dtype, misaligned), self.first + first)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        x = tensors[self.n]
        if x is None or x.stride() != self.form.strides or x.dtype != self.form.dtype:
            raise AssertionError(f"{self} was laid out for another tensor")
        return x if x.shape == self.form.shape else x.narrow(-2, self.first, self.form.shape[-2])


class Tile(NamedTuple):
    """An operand by a descriptor that loads blocks of this shape."""

    operand: Operand
    block: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor | None]) -> TensorDescriptor:
        form = self.operand.form
        return TensorDescriptor(self.operand.of(tensors), list(form.shape), list(form.strides), list(self.block))


class Workspace:
    """Tensors that only a call's kernels use, in one allocation, which takes time on the host.

    first: the number of its first among the call's tensors. A gap follows each part, so
    that tools/ptx, which watches parts, sees what reaches over an end; a checker that watches
    allocations does not.
    """

    def __init__(self, first: int) -> None:
        self._first, self._bytes = first, 0
        self._parts: list[tuple[int, Form]] = []
        self._zeros: list[tuple[int, int]] = []

    def add(self, dtype: torch.dtype, *shape: int, zeros: bool = False) -> Operand:
        """One more part, contiguous."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        start, form = self._bytes, Form(shape, strides, dtype)
        past = start + math.prod(shape) * dtype.itemsize
        self._parts.append((start, form))
        if zeros:
            self._zeros.append((start, past))
        self._bytes = (past // PART + 1) * PART
        return Operand(self._first + len(self._parts) - 1, form)

    def allocate(self, device: torch.device) -> Tensor | None:
        """uint8 [bytes], zero only where it has to be; None where there are no parts."""
        if not self._parts:
            return None
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        if memory.data_ptr() % ALIGNMENT:  # its parts were taken to be aligned
            raise RuntimeError(f"{device} gives memory that does not start at a multiple of {ALIGNMENT} bytes")
        for start, past in self._zeros:
            memory[start:past].zero_()
        return memory

    def addresses(self, memory: Tensor | None) -> list[int]:
        """Addresses of the parts."""
        if memory is None:
            return []
        base = memory.data_ptr()
        return [base + start for start, _ in self._parts]

    def views(self, memory: Tensor | None) -> list[Tensor]:
        """Its parts."""
        if memory is None:
            return []
        return [
            memory.view(form.dtype).as_strided(form.shape, form.strides, start // form.dtype.itemsize)
            for start, form in self._parts
        ]


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


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
        """Launches through Triton's front."""
        values = [x.of(tensors) if isinstance(x, (Operand, Tile)) else x for x in self._values]
        compiled = self.function[self.grid](*values, **self._options)
        if isinstance(compiled, CompiledKernel) and knobs.runtime.add_stages_inspection_hook is None:
            self._compiled = compiled

    def again(self, addresses: list[int], stream: int, told: bool) -> None:
        """Launches as the front does what it has found. Integers are pointers to a launcher, too.

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
        """Launches on the current stream. Both lists get what lies in the workspace, too."""
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
