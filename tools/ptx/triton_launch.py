"""Execution of Triton's launches on the CPU, through the PTX that Triton compiles for an
architecture.

with executed(90):
    rel_attention(..., backend="triton")
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

os.environ.pop("TRITON_INTERPRET", None)  # kernels are not compiled if it is set
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from pretended_gpu import pretended_gpu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ptx.block import Launch
from ptx.counts import Counts
from ptx.decode import Kernel
from ptx.faults import NotModelled
from ptx.global_memory import GlobalMemory
from ptx.instructions.tensor_copies import TensorMap
from ptx.parse import parse

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
# Older versions emit products of data copied by cp.async without a fence.proxy.async, as CUTLASS
# does, overwrite registers that a product still reads, and write a product's factor after its
# wgmma.fence, where ptxas inserts another one (its remark C7519).
STRICT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
Change = Callable[[str, str], str]  # maps (kernel name, PTX) to PTX


class Executor:
    """Runs launches for one architecture.

    change: modifies a kernel's PTX, to plant a fault. counting: whether to fill `counts`.

    Attributes:
        counts: counts of each kernel, summed over its launches.
        kernels: decoded kernels by name and compilation key.
        compiled: Triton's last compilation of each kernel, by name.
    """

    _compiled: ClassVar[dict[Any, Any]] = {}  # shared by all executors, since compilation takes longest

    def __init__(self, capability: int, change: Change | None = None, counting: bool = False) -> None:
        self.capability, self.change, self.counting = capability, change, counting
        self.counts: dict[str, Counts] = {}
        self.kernels: dict[Any, Kernel] = {}
        self.compiled: dict[str, Any] = {}

    def launch(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Replacement of JITFunction.run. It returns None, so that no launch is cached and later
        ones come here too."""
        names = [p.name for p in function.params]
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in named.items() if k in names}
        options = {k: v for k, v in named.items() if k not in names}
        signature, constants, attributes, given = _specialise(function, values)
        key = (
            self.capability, function.fn.__name__, tuple(signature.items()), tuple(constants.items()),
            tuple((k, str(v)) for k, v in attributes.items()), tuple(sorted(options.items())),
        )  # fmt: skip
        if key not in self._compiled:
            source = ASTSource(function, signature, constants, attributes)
            target = GPUTarget("cuda", self.capability, 32)
            self._compiled[key] = triton.compile(source, target=target, options=options)
        compiled = self.compiled[function.fn.__name__] = self._compiled[key]
        if key not in self.kernels:
            ptx = compiled.asm["ptx"]
            if self.change is not None:
                ptx = self.change(function.fn.__name__, ptx)
            self.kernels[key] = Kernel(parse(ptx))
        self._run(function.fn.__name__, self.kernels[key], compiled.metadata, given, tuple(grid))

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


def _specialise(function: JITFunction, values: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, list[Any]]:
    """Specialize arguments as a call on a device would; return (signature, constants, attributes,
    arguments passed)."""
    signature: dict[str, Any] = {}
    constants, attributes, given = {}, {}, []
    for n, parameter in enumerate(function.params):
        value = values[parameter.name]
        divisible = [["tt.divisibility", 16]]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(n,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _NAMES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(n,)] = divisible
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                signature[parameter.name], constants[(n,)] = "constexpr", 1
                continue
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(n,)] = divisible
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif isinstance(value, TensorDescriptor):
            box = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_NAMES[value.base.dtype]}[{box}]>"
        else:
            raise NotModelled(f"{parameter.name} is a {type(value).__name__}")
        given.append(value)
    return signature, constants, attributes, given


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
    executor = Executor(capability, **settings)
    launch = mock.patch.object(JITFunction, "run", lambda f, *a, **k: executor.launch(f, *a, **k))
    with launch, pretended_gpu(capability, multiprocessors):
        yield executor
