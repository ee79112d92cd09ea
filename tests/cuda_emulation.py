"""csrc/cuda compiled as host C++ against simt_emulation.h: as a Python module that txl_kernels.cuda takes for its own,
or as a small program."""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pybind11

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "cuda"
CSRC = ROOT / "csrc" / "cuda"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
SOURCES = ("bindings.cpp", "launch.cu", "decode_f32.cu", "decode_bf16.cu", "decode_f16.cu")


def build(folder: Path) -> Any:
    """Compiles csrc/cuda into a module and imports it."""
    name = f"_cuda_emulated_{folder.name.replace('-', '_')}"
    include = ["-I", str(CSRC), "-I", str(HERE), "-I", pybind11.get_include(), "-I", sysconfig.get_path("include")]
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", f"-DTXL_MODULE={name}"]
    objects = [str(folder / f"{source}.o") for source in SOURCES]
    running = [
        subprocess.Popen(["g++", *FLAGS, *flags, *include, "-x", "c++", "-c", str(CSRC / source), "-o", out])
        for source, out in zip(SOURCES, objects, strict=True)
    ]
    if sum(process.wait() != 0 for process in running):
        raise RuntimeError("the emulated kernels do not compile")
    library = folder / f"{name}.so"
    subprocess.run(["g++", "-shared", *objects, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_driver(folder: Path, csrc: Path = CSRC, flags: tuple[str, ...] = ()) -> Path:
    """Compiles tests/cuda/driver.cpp with the kernels of the folder `csrc` into a program."""
    program = folder / "driver"
    command = ["g++", *FLAGS, "-O1", *flags, "-I", str(csrc), "-I", str(HERE), str(HERE / "driver.cpp")]
    subprocess.run([*command, "-x", "c++", str(csrc / "launch.cu"), "-o", str(program)], check=True)
    return program


def plan_of(module: Any, *sizes: int, window: int = 0, multiprocessors: int = 132, dtype: int = 0) -> Any:
    """Calls of B, H, L, M, D whose tensors lie nowhere."""
    strides = [[0] * 3] * 9, [[0] * 2] * 2
    return module.Plan(dtype, (*sizes, 1, 0, True, window), 1.0, 0, 1.0, *strides, True, multiprocessors)
