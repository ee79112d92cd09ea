"""csrc/cuda with its launches run from nvcc's PTX, on the CPU: host code by g++, kernels by ptx."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

from cuda_emulation import CSRC, HERE, build
from ptx.block import Launch
from ptx.decode import Kernel
from ptx.global_memory import GlobalMemory
from ptx.parse import kernels, parse

_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int,
)  # fmt: skip


def compile_ptx(folder: Path, architecture: str) -> list[str]:
    """nvcc's PTX of the kernels of every dtype."""
    outputs = [folder / f"{source.stem}.{architecture}.ptx" for source in sorted(CSRC.glob("decode_*.cu"))]
    for out in outputs:
        source = CSRC / f"{out.name.split('.')[0]}.cu"
        command = ["nvcc", "-std=c++17", f"-arch={architecture}", "-ptx", "-I", CSRC, source, "-o", out]
        subprocess.run(command, check=True)
    return [out.read_text() for out in outputs]


class PtxModule:
    """Stands in for the compiled module.

    Attributes:
        faults: what running the kernels found; a callback cannot raise.
    """

    def __init__(self, folder: Path) -> None:
        self._module = build(folder, HERE / "ptx_launch")
        self._callback = _CALLBACK(self._launch)  # kept alive
        address = ctypes.c_void_p.in_dll(ctypes.CDLL(self._module.__file__), "txl_launch_elsewhere")
        address.value = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._texts: dict[str, str] = {}
        self._kernels: dict[str, Kernel] = {}
        self.faults: list[BaseException] = []

    def use(self, modules: list[str]) -> None:
        """The PTX that launches take from here on."""
        self._texts = {name: ptx for ptx in modules for name in kernels(ptx)}
        self._kernels = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _launch(
        self, name: bytes, grid: Any, threads: int, shared: int, params: int, size: int, spans: Any, count: int
    ) -> None:
        try:
            entry = name.decode()
            if entry not in self._kernels:
                self._kernels[entry] = Kernel(parse(self._texts[entry], entry))
            memory = GlobalMemory()
            for n in range(count):
                memory.add_bytes(spans[2 * n], spans[2 * n + 1])
            data = ctypes.string_at(params, size)
            Launch(self._kernels[entry], data, (grid[0], grid[1], grid[2]), threads, shared, memory).run()
        except BaseException as error:
            self.faults.append(error)
