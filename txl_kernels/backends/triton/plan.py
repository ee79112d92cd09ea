"""What the launches of one call share: sizes, settings as kernels take them, and how tiles are
loaded.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from txl_kernels.backends.triton import config
from txl_kernels.backends.triton.interpreter import interpreted
from txl_kernels.call import Call, dropout
from txl_kernels.call.fields import memory_len_of

LOG2E = 1.4426950408889634
MAX_KEYS = 2**30  # positions are computed in 32 bits
LARGEST_BLOCK = 128  # rows of a tile, at most


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that should run at once to fill the device; under the interpreter a number that
    makes tests split.
    """
    return 8 if interpreted() else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> config.Capability:
    return config.INTERPRETER if interpreted() else torch.cuda.get_device_capability(device)


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def wide(*tensors: Tensor) -> bool:
    """Whether offsets inside a tile of rows need 64 bits."""
    return any(x.stride(-2) * LARGEST_BLOCK >= 2**31 for x in tensors)


def describable(x: Tensor) -> bool:
    """Whether the copy engine can take it: 16-byte aligned rows, nothing empty, nothing
    expanded.
    """
    unit = 16 // x.element_size()
    return (
        x.data_ptr() % 16 == 0
        and x.numel() > 0
        and x.stride(-1) == 1
        and all(s > 0 and s % unit == 0 for s in x.stride()[:-1])
    )


class Plan(NamedTuple):
    """Sizes as in `rel_attention`, and what follows from a call's settings.

    r is cut to the T rows that `causal` and `window` let some query use: what lies beyond may hold
    anything.
    """

    B: int
    H: int
    L: int
    M: int
    T: int
    D: int
    k_mem: Tensor  # k and v in place of a memory nobody sees, of which nothing is read
    v_mem: Tensor
    unseen: int  # rows of k_mem and v_mem before any window
    r: Tensor
    first_row: int  # of the call's r
    zero_row: int  # of this r
    back: int  # keys seen before a query's own position
    ahead: int  # keys seen from it on
    sign: float
    scale_log2: float
    drop_below: int
    keep_scale: float
    kind: str  # of products, see config
    block_d: int
    wide: bool  # whether offsets inside a tile of q, k, v, the memory or r need 64 bits
    constants: dict[str, Any]  # other compile-time arguments of every kernel
    descriptors: bool  # whether k, v, r and the memory are loaded by descriptors

    @property
    def bh(self) -> int:
        return self.B * self.H

    def tile(self, kernel: str, descriptors: bool, atomics: bool = False) -> config.Config:
        """Tile sizes of one kernel of this call."""
        crowded = atomics or bool(self.constants["DROPOUT"])
        return config.choose(kernel, capability(self.r.device), self.kind, self.block_d, descriptors, crowded)

    def rows(self, x: Tensor, first: int, block: int, tma: bool) -> Any:
        """x itself, or its descriptor from row `first` on, which loads blocks of `block` rows."""
        if not tma:
            return x
        x = x[..., first:, :]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 2) + [block, self.block_d])

    def sources(self, call: Call, block: int, left_out: str) -> dict[str, Any]:
        """k, v, the memory and r as the kernels that walk keys take them.

        left_out: "K" or "V", of which bounds leave rows out that a kernel must not read: then these
        come by pointers.
        """
        each = {"K": (call.k, 0), "V": (call.v, 0), "R": (self.r, 0)}
        each |= {"K_MEM": (self.k_mem, self.unseen), "V_MEM": (self.v_mem, self.unseen)}
        bounded = call.start is not None or call.end is not None
        return {
            name: self.rows(x, first, block, self.descriptors and not (bounded and name[0] == left_out))
            for name, (x, first) in each.items()
        }


def make_plan(call: Call) -> Plan:
    """The plan of a checked call."""
    batch, heads, length, width = call.q.shape
    keys = memory_len_of(call) + length
    if keys > MAX_KEYS:
        raise ValueError(f"triton takes at most {MAX_KEYS} keys, memory and segment, got {keys}")
    back = keys if call.window is None else min(call.window - 1, keys)
    k_mem, v_mem, unseen = call.k, call.v, 0
    if call.k_mem is not None and call.v_mem is not None and memory_len_of(call) and back:
        k_mem, v_mem, unseen = call.k_mem, call.v_mem, max(memory_len_of(call) - back, 0)
    first_row = min(max(call.zero_row - (0 if call.causal else length - 1), 0), call.r.size(1))
    past_row = min(call.zero_row + min(back, keys - 1) + 1, call.r.size(1))
    r = call.r[:, first_row : max(past_row, first_row)]
    rows = (call.k, call.v, k_mem, v_mem, r)
    kind = config.kind_of(call.q.dtype)
    block_d = max(16, triton.next_power_of_2(width))
    constants = {
        "D": width,
        "BLOCK_D": block_d,
        "DROPOUT": call.dropout_p > 0,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
    }
    return Plan(
        batch, heads, length, memory_len_of(call), r.size(1), width, k_mem, v_mem, unseen, r, first_row,
        zero_row=call.zero_row - first_row,
        back=back,
        ahead=1 if call.causal else keys,
        # Kernels see a positive scale and queries of the right sign; a scale of 0 makes all scores
        # 0.
        sign=float((call.scale > 0) - (call.scale < 0)),
        scale_log2=abs(call.scale) * LOG2E if call.scale else 1.0,
        drop_below=dropout.drop_threshold(call.dropout_p) - 2**31,
        keep_scale=1.0 / (1.0 - call.dropout_p),
        kind=kind,
        block_d=block_d,
        wide=wide(call.q, *rows),
        constants=constants,
        descriptors=config.has_descriptors(capability(call.q.device)) and all(map(describable, rows)),
    )  # fmt: skip
