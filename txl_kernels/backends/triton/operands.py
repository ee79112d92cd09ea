"""What stands for tensors in launches that are laid out before there are any."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton.form import ALIGNMENT, Form

PART = 256  # bytes, of which a part of the workspace starts at a multiple


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
        """Of its parts."""
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
