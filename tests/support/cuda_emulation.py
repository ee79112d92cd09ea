"""csrc/cuda compiled as host C++ against simt_emulation.h: as a Python module in place of the
backend's, or as a small program."""

import functools
import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pybind11
import torch
from builds import ROOT, once
from cases import Case, as_fields, make_inputs

from txl_kernels.backends import cuda, native_modules
from txl_kernels.backends.limits import DECODE_QUERIES
from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call

HERE = ROOT / "tests" / "txl_kernels" / "cuda"
CSRC = ROOT / "csrc" / "cuda"
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]  # which refuses a fiber's jumps
SOURCES = (
    "../python/call.cpp", "../python/tensor.cpp", "bindings.cpp", "device.cu",
    "decode/decode_launch.cu", "decode/decode_f32.cu", "decode/decode_bf16.cu", "decode/decode_f16.cu",
    "hopper/hopper_launch.cu", "hopper/forward_bf16.cu", "hopper/forward_f16.cu",
    "hopper/backward_bf16.cu", "hopper/backward_f16.cu",
)  # fmt: skip


@functools.cache
def build(launches: Path | None = None, variant: str | None = None) -> Any:
    """csrc/cuda compiled into a module and imported.

    launches: a folder with another simt_emulation.h, and the sources that it needs. variant: a
    macro that chooses other instances (csrc/cuda/hopper/config.cuh).
    """
    name = "_".join(["emulated", *([launches.name] if launches else []), *([variant.lower()] if variant else [])])
    sources = [CSRC.parent, *sorted(HERE.rglob("*.h")), *sorted(HERE.rglob("*.cpp"))]
    settings = [FLAGS, variant, sysconfig.get_path("include"), pybind11.__version__]
    folder = once(name, sources, settings, "g++", lambda to: _compile(to, name, launches, variant))
    spec = importlib.util.spec_from_file_location(f"_cuda_{name}", folder / "module.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native_modules.connect(module)
    return module


def _compile(folder: Path, name: str, launches: Path | None, variant: str | None) -> None:
    before = [] if launches is None else ["-I", str(launches)]
    sources = [CSRC / source for source in SOURCES] + sorted(launches.glob("*.cpp") if launches else [])
    folders = (CSRC, HERE, pybind11.get_include(), sysconfig.get_path("include"))
    include = [*before, *(f"-I{folder}" for folder in folders)]
    flags = ["-O1", "-fPIC", f"-fvisibility={'default' if launches else 'hidden'}", f"-DTXL_MODULE=_cuda_{name}"]
    flags += [f"-D{variant}"] if variant else []
    flags += [f'-DTXL_SOURCE_HASH="{source_hash(CSRC.parent, "_cuda")}"']
    objects = [str(folder / f"{n}.o") for n in range(len(sources))]
    running = [
        subprocess.Popen(["g++", *FLAGS, *flags, *include, "-x", "c++", "-c", str(source), "-o", out])
        for source, out in zip(sources, objects, strict=True)
    ]
    if sum(process.wait() != 0 for process in running):
        raise RuntimeError("the emulated kernels do not compile")
    subprocess.run(["g++", "-shared", *objects, "-o", str(folder / "module.so"), "-ldl"], check=True)


def build_driver(folder: Path, csrc: Path = CSRC, flags: tuple[str, ...] = ()) -> Path:
    """Compiles tests/txl_kernels/cuda/driver.cpp with the kernels of the folder `csrc` into a
    program."""
    program = folder / "driver"
    command = ["g++", *FLAGS, "-O1", *flags, "-I", str(csrc), "-I", str(HERE), str(HERE / "driver.cpp")]
    subprocess.run([*command, "-x", "c++", str(csrc / "decode" / "decode_launch.cu"), "-o", str(program)], check=True)
    return program


def meta_call(
    B: int, H: int, L: int, M: int, D: int, dtype: torch.dtype = torch.float32, window: int | None = None
) -> Call:
    """A call whose tensors are on the meta device."""
    shapes = dict.fromkeys("qkv", (B, H, L, D)) | dict.fromkeys(("k_mem", "v_mem"), (B, H, M, D))
    shapes |= {"r": (H, M + L, D)} | dict.fromkeys(("content_bias", "position_bias"), (H, D))
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    return as_fields(make_inputs(Case(D=D, window=window)))._replace(**tensors)


def plan_of(*sizes: Any, module: Any = None, window: int | None = None, multiprocessors: int = 132) -> Any:
    """The plan of a meta call with these sizes. module: None for the compiled one."""
    call = meta_call(*sizes, window=window)
    module = cuda.native.module if module is None else module
    kind = module.DecodePlan if call.q.size(2) <= DECODE_QUERIES else module.PrefillPlan
    return kind(call, call.q, cuda.LIMITS.dtypes.index(call.q.dtype), 0, multiprocessors, -1)
