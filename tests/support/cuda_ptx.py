"""csrc/cuda whose launches execute nvcc's PTX on the CPU: host code by g++, kernels by
tools/ptx."""

import ctypes
import functools
import struct
import subprocess
from pathlib import Path
from typing import Any

from builds import once
from cuda_emulation import CSRC, HERE, build
from ptx.block import Launch
from ptx.counts import Counts
from ptx.decode import Kernel
from ptx.faults import Fault
from ptx.global_memory import GlobalMemory
from ptx.instructions.tensor_copies import TensorMap
from ptx.parse import kernels, parse

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int,
)  # fmt: skip
_SWIZZLES = {32: 1, 128: 3}  # by the bytes of a row; a map that no kernel uses has any
_MAP = struct.Struct("Q4q4q4iii")  # TensorMap of hopper_emulation.h: innermost axis first, steps in bytes


def compile_ptx(
    folder: Path, architecture: str, csrc: Path, patterns: tuple[str, ...], options: tuple[str, ...] = ()
) -> list[str]:
    """Return nvcc's PTX of some sources of the folder `csrc`."""
    outputs = []
    for source in sorted(path for pattern in patterns for path in csrc.glob(pattern)):
        outputs.append(out := folder / f"{source.stem}.{architecture}.ptx")
        command = ["nvcc", "-std=c++17", f"-arch={architecture}", *options, "-ptx", "-I", csrc, source, "-o", out]
        subprocess.run(command, check=True)
    return [out.read_text() for out in outputs]


@functools.cache
def compiled_ptx(architecture: str, variant: str | None = None) -> list[str]:
    """Return nvcc's PTX of the kernels of every dtype. variant: see `cuda_emulation.build`."""
    patterns = ("decode/decode_[bf]*.cu", "hopper/*_*f16.cu")[: 2 if architecture == "sm_90a" else 1]
    options = (f"-D{variant}",) if variant else ()
    made = once("_".join(["ptx", architecture, *options]), [CSRC], (patterns, options), "nvcc",
                lambda folder: compile_ptx(folder, architecture, CSRC, patterns, options))  # fmt: skip
    return [path.read_text() for path in sorted(made.glob("*.ptx"))]


@functools.cache
def ptx_module(variant: str | None = None) -> "PtxModule":
    """Return the module of this process."""
    return PtxModule(variant)


class PtxModule:
    """A replacement of the compiled module.

    Attributes:
        faults: errors found by the executor; a callback cannot raise.
        counts: the counts of each kernel by name; None not to count.
        first: warpgroups in the order in which they proceed, see ptx.block.Launch.
        early: parts of the names of kernels that may begin before the one before has ended.
    """

    def __init__(self, variant: str | None = None) -> None:
        self._module = build(HERE / "ptx_launch", variant)
        self._callback = _CALLBACK(self._launch)  # kept alive
        address = ctypes.c_void_p.in_dll(ctypes.CDLL(self._module.__file__), "txl_launch_elsewhere")
        address.value = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._texts: dict[str, str] = {}
        self._kernels: dict[str, Kernel] = {}
        self.faults: list[BaseException] = []
        self.counts: dict[str, Counts] | None = None
        self.first: tuple[int, ...] = ()
        self.early: tuple[str, ...] = ()
        self._before: GlobalMemory | None = None  # of the last launch

    def use(self, modules: list[str]) -> None:
        """Execute this PTX in launches from now on."""
        self._texts = {name: ptx for ptx in modules for name in kernels(ptx)}
        self._kernels = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _launch(
        self, name: bytes, grid: Any, threads: int, shared: int, params: int, size: int, spans: Any, count: int,
        maps: Any, map_count: int,
    ) -> None:  # fmt: skip
        try:
            entry = name.decode()
            if entry not in self._kernels:
                self._kernels[entry] = Kernel(parse(self._texts[entry], entry))
            memory = GlobalMemory()
            for n in range(count):
                memory.add_bytes(spans[2 * n], spans[2 * n + 1])
            data = ctypes.string_at(params, size)
            described = {int(at): _tensor_map(data, int(at)) for at in maps[:map_count]}
            size3 = (grid[0], grid[1], grid[2])
            counts = None
            if self.counts is not None:
                counts = self.counts.setdefault(entry, Counts(self._kernels[entry].program))
            kernel = self._kernels[entry]
            is_early = any(name in entry for name in self.early)
            memory.before = self._before if is_early else None
            Launch(kernel, data, size3, threads, shared, memory, described, counts, first=self.first).run()
            blocks = {(n - 1) // threads for n in memory.waited - {0}}
            if is_early and len(blocks) < size3[0] * size3[1] * size3[2]:
                raise Fault("a block ends without griddepcontrol.wait, so the kernel after it may begin too early")
            self._before = memory
        except BaseException as error:
            self.faults.append(error)


def _tensor_map(params: bytes, at: int) -> TensorMap:
    address, *numbers, item, swizzle = _MAP.unpack_from(params, at)
    sizes, steps, box = (tuple(numbers[n : n + 4][::-1]) for n in (0, 4, 8))
    strides = tuple(step // max(item, 1) for step in steps)
    return TensorMap(address, item, sizes, strides, box, _SWIZZLES.get(swizzle, 0))
