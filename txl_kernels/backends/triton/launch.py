"""Launches of kernels. They are laid out once for calls whose tensors have the same forms, with an
`Operand` in place of each tensor, and run with the tensors of each call.

The first run launches by Triton's public `kernel[grid](...)`, which binds and specializes every
argument. A layout fixes all of them but addresses, so later runs call the compiled kernels that the
first has returned, with the addresses of their own tensors (`Kept`). Forward calls whose memories
differ in length share kernels, too (`Changed`).
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton import parse_version

# Triton's versions whose compiled kernels have a `run` with the arguments that `Kept.run` gives.
KEEPS = (3, 6) <= parse_version(triton.__version__) <= (3, 9)
ALIGNMENT = 16  # bytes; descriptors need it
PART = 256  # bytes; each part of a workspace starts at a multiple


class Form(NamedTuple):
    """The shape, strides, dtype and alignment of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    misaligned: int = 0  # bytes past a multiple of ALIGNMENT


def forms_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the fields of each tensor's `Form` as a plain tuple, which is faster to make; None for
    None."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT) for x in tensors])


class Operand(NamedTuple):
    """A tensor of a launch: number `n` of the call's tensors, from row `first` on."""

    n: int
    form: Form
    first: int = 0

    def rows(self, first: int, past: int) -> "Operand":
        """Return the operand of rows [first, past), counted in the last axis but one."""
        shape, strides, dtype, misaligned = self.form
        shape = (*shape[:-2], past - first, shape[-1])
        misaligned = (misaligned + first * strides[-2] * dtype.itemsize) % ALIGNMENT
        return Operand(self.n, Form(shape, strides, dtype, misaligned), self.first + first)

    @property
    def offset(self) -> int:
        """The bytes from the tensor's start to the first row."""
        return self.first * self.form.strides[-2] * self.form.dtype.itemsize if self.first else 0

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        x = tensors[self.n]
        if x is None or x.stride() != self.form.strides or x.dtype != self.form.dtype:
            raise AssertionError(f"{self} was laid out for another tensor")
        return x if x.shape == self.form.shape else x.narrow(-2, self.first, self.form.shape[-2])


class Tile(NamedTuple):
    """An operand that is passed as a descriptor, which loads blocks of this shape."""

    operand: Operand
    block: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor | None]) -> TensorDescriptor:
        return self.over(self.operand.of(tensors))

    def over(self, base: Any) -> TensorDescriptor:
        """Return the descriptor of a tensor, or of its `Address`."""
        form = self.operand.form
        shape, strides = list(form.shape), list(form.strides)
        if strides[0] == 0:  # one table for all heads; no axis of a descriptor is expanded
            shape[0], strides[0] = 1, shape[1] * strides[1]
        return TensorDescriptor(base, shape, strides, list(self.block))


class Workspace:
    """The tensors that only a call's kernels use, in one allocation, because each allocation takes
    time on the host.

    first: the number of its first part among the call's tensors. A gap follows each part, so that
    tools/ptx, which knows the parts, finds an access past the end of one; a tool that knows only
    allocations does not.
    """

    def __init__(self, first: int) -> None:
        self._first, self._bytes = first, 0
        self._parts: list[tuple[int, Form]] = []
        self._zeros: list[tuple[int, int]] = []

    def add(self, dtype: torch.dtype, *shape: int, zeros: bool = False) -> Operand:
        """Add a contiguous part, and return its operand."""
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        start, form = self._bytes, Form(shape, strides, dtype)
        past = start + math.prod(shape) * dtype.itemsize
        self._parts.append((start, form))
        if zeros:
            self._zeros.append((start, past))
        self._bytes = (past // PART + 1) * PART
        return Operand(self._first + len(self._parts) - 1, form)

    def allocate(self, device: torch.device) -> Tensor | None:
        """Allocate uint8 [bytes], with zeros only where a part needs them; None if there are no
        parts."""
        if not self._parts:
            return None
        memory = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        if memory.data_ptr() % ALIGNMENT:  # layouts assume aligned parts
            raise RuntimeError(f"{device} gives memory that does not start at a multiple of {ALIGNMENT} bytes")
        for start, past in self._zeros:
            memory[start:past].zero_()
        return memory

    def addresses(self, start: int) -> list[int]:
        """Return the addresses of the parts of a workspace that starts at an address."""
        return [start + offset for offset, _ in self._parts]

    def views(self, memory: Tensor | None) -> list[Tensor]:
        """Return the parts as views."""
        if memory is None:
            return []
        return [
            memory.view(form.dtype).as_strided(form.shape, form.strides, start // form.dtype.itemsize)
            for start, form in self._parts
        ]


def on_device(device: torch.device) -> Any:
    """Return a context in which `device` is the current device, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class Launch:
    """A kernel, its grid, and its arguments by name, including Triton's options. `Operand` and
    `Tile` take the place of tensors."""

    def __init__(self, function: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.function, self.grid = function, grid
        # Multiply-adds are fused, as when the tables of compiled kernels were made. Triton's
        # default will change.
        self.arguments = {"enable_fp_fusion": True, **arguments}
        self.given = {name: x for name, x in arguments.items() if isinstance(x, (Operand, Tile))}

    def run(self, tensors: Sequence[Tensor | None]) -> Any:
        """Launch on the current stream, and return what Triton returns: the compiled kernel, if it
        launched one. tensors: the call's, followed by the workspace's."""
        return self.function[self.grid](**self.arguments | {name: x.of(tensors) for name, x in self.given.items()})


class Address(NamedTuple):
    """The address of a tensor, in place of the tensor in a descriptor that is kept."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Changed(NamedTuple):
    """The differences between calls that share compiled kernels, beside addresses.

    Attributes:
        names: integer arguments of kernels; the same for all calls that share kernels.
        values: theirs, in this order.
        tiles: by the number of a tensor that is loaded by a descriptor: the bytes to the first row,
            the number of rows, and the strides.
    """

    names: tuple[str, ...]
    values: tuple[int, ...]
    tiles: Mapping[int, tuple[int, int, tuple[int, ...]]]


NOTHING = Changed((), (), {})


class KeptTile:
    """The descriptor of a tile, which is made again when its tensor is at another address, or has
    other rows or strides."""

    def __init__(self, tile: Tile) -> None:
        form = tile.operand.form
        self._dtype = form.dtype
        self.as_laid_out = tile.operand.offset, form.shape[-2], form.strides
        self._fields = vars(tile.over(Address(0, form.dtype)))  # which Triton has checked
        self._before, self._width = form.shape[:-2] if form.strides[0] else (1,), form.shape[-1]
        self._last: Any = (None, None, None, None)

    def at(self, address: int, rows: int, strides: tuple[int, ...]) -> TensorDescriptor:
        before = self._last  # one object, because threads share a layout
        if before[:3] == (address, rows, strides):
            return before[3]
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        descriptor.__dict__ = {
            **self._fields,
            "base": before[3].base if before[0] == address else Address(address, self._dtype),
            "shape": [*self._before, rows, self._width],
            "strides": [strides[0] or rows * strides[1], *strides[1:]],  # as in `Tile.over`
        }
        self._last = address, rows, strides, descriptor
        return descriptor


class Kept:
    """A compiled kernel with its arguments in the kernel's order, of which addresses change, and
    what `Changed` has."""

    def __init__(self, launch: Launch, kernel: CompiledKernel) -> None:
        self._kernel = kernel
        self._grid = (*launch.grid, 1, 1)[:3]
        parameters = {x.name: x.default for x in launch.function.params}
        self._names = tuple(parameters)
        self._integers: list[tuple[int, int]] | None = None  # position, number of the value
        self._arguments = [launch.arguments.get(name, default) for name, default in parameters.items()]
        self._pointers: list[tuple[int, int, int]] = []  # position, number of the tensor, offset in bytes
        self._tiles: list[tuple[int, int, KeptTile]] = []
        for position, name in enumerate(parameters):
            x = launch.given.get(name)
            if isinstance(x, Tile):
                self._tiles.append((position, x.operand.n, KeptTile(x)))
            elif x is not None:
                self._pointers.append((position, x.n, x.offset))

    def run(self, stream: int, addresses: Sequence[int], changed: Changed) -> None:
        """Launch. addresses: of the call's tensors, followed by the workspace's."""
        arguments = self._arguments.copy()
        for position, n, offset in self._pointers:
            arguments[position] = addresses[n] + offset
        for position, n, tile in self._tiles:
            offset, rows, strides = changed.tiles.get(n, tile.as_laid_out)
            arguments[position] = tile.at(addresses[n] + offset, rows, strides)
        if changed.values:
            if self._integers is None:
                self._integers = [(self._names.index(x), n) for n, x in enumerate(changed.names) if x in self._names]
            for position, n in self._integers:
                arguments[position] = changed.values[n]
        kernel, runtime = self._kernel, knobs.runtime
        kernel.run(
            *self._grid, stream, kernel.function, kernel.packed_metadata, None, runtime.launch_enter_hook,
            runtime.launch_exit_hook, *arguments,
        )  # fmt: skip


def keep(launches: Sequence[Launch], kernels: Sequence[Any]) -> tuple[Kept, ...] | None:
    """Return kernels to run again, or None: one was not launched (in the interpreter, for example),
    is not NVIDIA's, or is of a version of Triton whose `run` is unknown."""
    for kernel in kernels:
        if not KEEPS or not isinstance(kernel, CompiledKernel) or kernel.metadata.target.backend != "cuda":
            return None
    return tuple(Kept(launch, kernel) for launch, kernel in zip(launches, kernels, strict=True))


def is_watched(functions: Sequence[Any]) -> bool:
    """Whether Triton does more at a launch than to launch: a profiler's hooks, checks of addresses,
    or compilation by other passes."""
    runtime, compilation = knobs.runtime, knobs.compilation
    return bool(
        runtime.debug
        or runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.add_stages_inspection_hook is not None
        or compilation.instrumentation_mode
        or getattr(compilation, "fpsan_homomorphic_casts", False)
        or any(function.pre_run_hooks or function.debug for function in functions)
    )


class Launches:
    """All kernels of a call, in order. workspace: the tensors that only they use."""

    def __init__(self, launches: Sequence[Launch], workspace: Workspace) -> None:
        self.launches, self.workspace = tuple(launches), workspace
        self.has_tiles = any(isinstance(x, Tile) for launch in launches for x in launch.given.values())
        self._functions = tuple({launch.function for launch in launches})
        self._kept: tuple[Kept, ...] | None = None

    def is_kept(self) -> bool:
        """Whether compiled kernels can be run again as they are."""
        return self._kept is not None and not is_watched(self._functions)

    def run(self, device: torch.device, tensors: Sequence[Tensor | None], changed: Changed = NOTHING) -> None:
        """Allocate the workspace, and launch on the current stream.

        tensors: the call's.
        changed: how the call differs from those that were laid out; only if `is_kept`.
        """
        memory = self.workspace.allocate(device)  # lives until the last launch
        with on_device(device):
            kept = self._kept
            if kept is None or (changed is NOTHING and is_watched(self._functions)):
                together = [*tensors, *self.workspace.views(memory)]
                kernels = [launch.run(together) for launch in self.launches]
                self._kept = kept or keep(self.launches, kernels)
                return
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            if memory is not None:
                addresses += self.workspace.addresses(memory.data_ptr())
            stream = triton.runtime.driver.active.get_current_stream(triton.runtime.driver.active.get_current_device())
            for launch in kept:
                launch.run(stream, addresses, changed)
