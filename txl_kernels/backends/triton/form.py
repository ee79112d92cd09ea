"""What launches depend on: of a tensor, and of settings outside a call. Both are keys of plans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from txl_kernels.backends.triton import config

# Bytes. Triton compiles anew for pointers that are no multiples, and descriptors need them.
ALIGNMENT = 16


class Form(NamedTuple):
    """A tensor without its values and its place."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    misaligned: int = 0  # bytes past a multiple of ALIGNMENT


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """0 for None."""
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
