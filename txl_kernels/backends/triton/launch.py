"""Launches of kernels, by Triton's public `kernel[grid](...)`. They are laid out once for calls
whose tensors have the same forms, with an `Operand` in place of each tensor, and run with the
tensors of each call."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
        form = self.operand.form
        shape, strides = list(form.shape), list(form.strides)
        if strides[0] == 0:  # one table for all heads; no axis of a descriptor is expanded
            shape[0], strides[0] = 1, shape[1] * strides[1]
        return TensorDescriptor(self.operand.of(tensors), shape, strides, list(self.block))


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
        self._arguments = {"enable_fp_fusion": True, **arguments}
        self._given = {name: x for name, x in arguments.items() if isinstance(x, (Operand, Tile))}

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream. tensors: the call's, followed by the workspace's."""
        self.function[self.grid](**self._arguments | {name: x.of(tensors) for name, x in self._given.items()})


class Launches:
    """All kernels of a call, in order. workspace: the tensors that only they use."""

    def __init__(self, launches: Sequence[Launch], workspace: Workspace) -> None:
        self.launches, self.workspace = tuple(launches), workspace

    def run(self, device: torch.device, tensors: Sequence[Tensor | None]) -> None:
        """Allocate the workspace, and launch on the current stream. tensors: the call's."""
        together = [*tensors, *self.workspace.views(self.workspace.allocate(device))]
        with on_device(device):
            for launch in self.launches:
                launch.run(together)
