"""Execution of Triton's launches on the CPU, through the PTX that Triton compiles for an
architecture.

with executed(90):
    rel_attention(..., backend="triton")
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels are not compiled if it is set

import numpy as np
import torch
import triton
from pretended_gpu import compiling
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ptx.block import Launch
from ptx.counts import Counts
from ptx.decode import Kernel
from ptx.faults import NotModelled
from ptx.global_memory import GlobalMemory
from ptx.instructions.tensor_copies import TensorMap
from ptx.parse import parse

# Older versions emit products of data copied by cp.async without a fence.proxy.async, as CUTLASS
# does, overwrite registers that a product still reads, and write a product's factor after its
# wgmma.fence, where ptxas inserts another one (its remark C7519).
STRICT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
Change = Callable[[str, str], str]  # maps (kernel name, PTX) to PTX


class Executor:
    """Runs launches.

    change: modifies a kernel's PTX, to plant a fault. counting: whether to fill `counts`.

    Attributes:
        counts: counts of each kernel, summed over its launches.
    """

    def __init__(self, change: Change | None = None, counting: bool = False) -> None:
        self.change, self.counting = change, counting
        self.counts: dict[str, Counts] = {}
        self._kernels: dict[str, Kernel] = {}  # by the compilation's hash

    def launch(self, function: JITFunction, compiled: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        name = function.fn.__name__
        if compiled.hash not in self._kernels:
            ptx = compiled.asm["ptx"]
            self._kernels[compiled.hash] = Kernel(parse(ptx if self.change is None else self.change(name, ptx)))
        given = [arguments[n] for n, kind in compiled.src.signature.items() if kind != "constexpr"]
        self._run(name, self._kernels[compiled.hash], compiled.metadata, given, grid)

    def _run(self, name: str, kernel: Kernel, metadata: Any, given: list[Any], grid: tuple[int, ...]) -> None:
        memory, maps = GlobalMemory(), {}
        data = bytearray(kernel.param_bytes)
        params = iter(kernel.program.params)

        def pack(value: int) -> None:
            at_name, size, _ = next(params)
            start = kernel.param_at[at_name]
            data[start : start + size] = (value % 256**size).to_bytes(size, "little")

        described = iter(metadata.tensordesc_meta or ())
        for value in given:
            if isinstance(value, torch.Tensor):
                memory.add(value)
                pack(value.data_ptr())
            elif isinstance(value, TensorDescriptor):
                memory.add(value.base)
                at_name, size, _ = next(params)
                if size != 128:
                    raise NotModelled(f"a descriptor of {size} bytes")
                maps[kernel.param_at[at_name]] = _tensor_map(value, next(described))
                for x in (*value.shape, *value.strides):
                    pack(int(x))
            else:
                pack(int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value))
        counts = None
        if self.counting:
            counts = self.counts.setdefault(name, Counts(kernel.program))
            if counts.program is not kernel.program:
                raise NotModelled(f"{name} was compiled twice while counting")
        sizes = (*map(int, grid), 1, 1)[:3]
        launch = Launch(
            kernel, bytes(data), sizes, 32 * metadata.num_warps, metadata.shared, memory, maps, counts,
            STRICT,
        )  # fmt: skip
        launch.run()


def _tensor_map(x: TensorDescriptor, meta: dict[str, Any]) -> TensorMap:
    shape, strides = (tuple(int(n) for n in y) for y in (x.shape, x.strides))
    return TensorMap(
        x.base.data_ptr(), x.base.element_size(), shape, strides, tuple(meta["block_size"]), int(meta["swizzle"])
    )


@contextlib.contextmanager
def executed(capability: int, multiprocessors: int = 4, **settings: Any) -> Iterator[Executor]:
    """A context in which the `triton` backend accepts CPU tensors and runs as on a GPU of this
    capability (80 or 90).

    settings: arguments of `Executor`.
    """
    executor = Executor(**settings)
    with compiling(capability, executor.launch, multiprocessors):
        yield executor
