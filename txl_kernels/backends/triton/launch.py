"""Launches of kernels, laid out once for calls whose tensors are alike and run with the tensors of
each call, by Triton's public `kernel[grid](...)`. An `Operand` stands for a tensor in a launch.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes, which descriptors need
PART = 256  # bytes, of which a part of the workspace starts at a multiple


class Form(NamedTuple):
    """A tensor without its values and its place."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    misaligned: int = 0  # bytes past a multiple of ALIGNMENT


def forms_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The fields of each tensor's `Form`, as a tuple, which is made faster; None for None."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT) for x in tensors])


class Operand(NamedTuple):
    """A tensor of a launch: number `n` of its call's, from row `first` on."""

    n: int
    form: Form
    first: int = 0

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


class Launch:
    """A kernel, its grid, and its arguments by name, Triton's options among them; `Operand` and
    `Tile` stand for tensors."""

    def __init__(self, function: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        self.function, self.grid = function, grid
        # Fused as when the tables of compiled kernels were made; Triton's own default is to change.
        self._arguments = {"enable_fp_fusion": True, **arguments}
        self._given = {name: x for name, x in arguments.items() if isinstance(x, (Operand, Tile))}

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream. tensors: the call's and the workspace's."""
        self.function[self.grid](**self._arguments | {name: x.of(tensors) for name, x in self._given.items()})


class Launches:
    """All kernels of a call, in order. workspace: tensors that only they use."""

    def __init__(self, launches: Sequence[Launch], workspace: Workspace) -> None:
        self.launches, self.workspace = tuple(launches), workspace

    def run(self, device: torch.device, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream."""
        together = [*tensors, *self.workspace.views(self.workspace.allocate(device))]
        with on_device(device):
            for launch in self.launches:
                launch.run(together)
