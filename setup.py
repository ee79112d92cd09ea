"""Builds txl_kernels._native and _cuda with CMake and ninja. Metadata is in pyproject.toml; torch
is not needed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Why a module was not built; read by txl_kernels/backends/native_modules.py.
NOTES = {"_native": "_native_missing.txt", "_cuda": "_cuda_missing.txt"}


def compiler_missing() -> str | None:
    """Why no C++ compiler can be used; None if there is one."""
    asked = os.environ.get("CXX")
    candidates = [asked.split()[0]] if asked else ["c++", "g++", "clang++"]
    if any(shutil.which(c) for c in candidates):
        return None
    return (
        f"txl_kernels was installed without its C++ kernels: no C++ compiler found ({', '.join(candidates)}). "
        "Install one (Debian: apt-get install g++) and install txl_kernels again."
    )


def cuda_missing() -> str | None:
    """Why the CUDA kernels are not built; None if they are. TXL_KERNELS_CUDA: auto (default), on,
    off."""
    wanted = os.environ.get("TXL_KERNELS_CUDA", "auto")
    if wanted not in ("auto", "on", "off"):
        raise SystemExit(f"TXL_KERNELS_CUDA must be auto, on or off, got {wanted!r}")
    if wanted == "off":
        return "txl_kernels was built with TXL_KERNELS_CUDA=off"
    reason = nvcc_does_not_work()
    if reason is not None and wanted == "on":
        raise SystemExit(f"TXL_KERNELS_CUDA=on, but {reason}")
    return None if reason is None else f"txl_kernels was built without its CUDA C++ kernels: {reason}"


def nvcc_does_not_work() -> str | None:
    """Why no CUDA source can be compiled for all the GPUs the module is for; None if it can."""
    asked = os.environ.get("CUDACXX")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [asked] if asked else ["nvcc", *(os.path.join(home, "bin", "nvcc") for home in homes if home)]
    nvcc = next(filter(None, map(shutil.which, candidates)), None)
    if nvcc is None:
        return f"no CUDA compiler found ({', '.join(candidates)}; set CUDACXX or CUDA_HOME)"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text("#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n__global__ void probe() {}\n")
        command = [nvcc, "-c", "-arch=sm_100", "-std=c++17", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        return f"{nvcc} cannot compile for sm_100, which takes CUDA 12.8 or newer: {last}"
    os.environ["CUDACXX"] = nvcc  # what CMake will use
    return None


class CMakeBuild(build_ext):
    """Configures and builds both modules, and puts them where setuptools expects the first."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        target.mkdir(parents=True, exist_ok=True)
        without_cuda = cuda_missing()
        reason = compiler_missing()
        if reason is not None and os.environ.get("TXL_KERNELS_CUDA") == "on":
            raise SystemExit(f"TXL_KERNELS_CUDA=on, but {reason}")
        self.note("_native", target, reason)
        self.note("_cuda", target, without_cuda or reason)
        if reason is not None:
            # A GPU or reference user needs no C++ kernels, so the install goes on; the package says
            # what is missing.
            print(f"WARNING: {reason}", file=sys.stderr)
            return
        try:
            self.cmake(target, cuda=without_cuda is None)
        except subprocess.CalledProcessError:
            if without_cuda is not None or os.environ.get("TXL_KERNELS_CUDA") == "on":
                raise
            why = (
                "txl_kernels was built without its CUDA C++ kernels: compiling them failed, see the output of the build"
            )
            print(f"WARNING: {why}", file=sys.stderr)
            self.note("_cuda", target, why)
            self.cmake(target, cuda=False)

    def note(self, name: str, target: Path, why: str | None) -> None:
        """Says beside where the module would be why it is not there, and removes what an earlier
        build left there."""
        note = target / NOTES[name]
        if why is None:
            note.unlink(missing_ok=True)
            return
        note.write_text(why + "\n", encoding="utf-8")
        (target / Path(self.get_ext_filename(name)).name).unlink(missing_ok=True)

    def cmake(self, target: Path, cuda: bool) -> None:
        import pybind11

        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DPYBIND11_FINDPYTHON=ON",
            # An earlier build's cache may name the ninja of an isolated environment that is gone.
            *([f"-DCMAKE_MAKE_PROGRAM={ninja}"] if (ninja := shutil.which("ninja")) else []),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTXL_CUDA={'ON' if cuda else 'OFF'}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)

    def copy_extensions_to_source(self) -> None:
        """For an in-place or editable build: each module, or the note on why there is none."""
        built = Path(self.build_lib).resolve() / "txl_kernels"
        for name in (*(self.get_ext_filename(module) for module in NOTES), *NOTES.values()):
            source, target = built / name, ROOT / "txl_kernels" / name
            if source.exists():
                fresh = target.with_suffix(".new")
                shutil.copyfile(source, fresh)
                fresh.replace(target)  # a running process keeps the module it has mapped
            else:
                target.unlink(missing_ok=True)


setup(
    ext_modules=[Extension("txl_kernels._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
