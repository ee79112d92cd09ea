"""csrc/cuda compiled as host C++ against simt_emulation.h: as a Python module that txl_kernels.cuda takes for its own."""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pybind11

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "cuda"
SOURCES = ("bindings.cpp", "launch.cu", "decode_f32.cu", "decode_bf16.cu", "decode_f16.cu")


def build(folder: Path, csrc: Path = ROOT / "csrc" / "cuda", dtypes: str = "f32 bf16 f16") -> Any:
    """Compiles the folder `csrc` (kernels of some dtypes) into a module and imports it."""
    name = f"_cuda_emulated_{folder.name.replace('-', '_')}"
    include = ["-I", str(csrc), "-I", str(HERE), "-I", pybind11.get_include()]
    include += ["-I", sysconfig.get_path("include")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", f"-DTXL_MODULE={name}"]
    missing = set("f32 bf16 f16".split()) - set(dtypes.split())
    stubs = folder / "stubs.cpp"
    lines = [f"void txl_cuda::forward_{x}(const Problem&, void*) {{ throw 0; }}" for x in sorted(missing)]
    stubs.write_text('#include "launch.h"\n' + "\n".join(lines) + "\n")
    chosen = [csrc / x for x in SOURCES if not any(f"_{m}." in x for m in missing)]
    running = []
    for source in (*chosen, stubs):
        command = ["g++", *flags, *include, "-x", "c++", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        running.append(subprocess.Popen(command))
    if any([process.wait() for process in running]):
        raise RuntimeError("the emulated kernels do not compile")
    library = folder / f"{name}.so"
    objects = [str(folder / f"{source.stem}.o") for source in (*chosen, stubs)]
    subprocess.run(["g++", "-shared", *objects, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
