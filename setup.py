"""Builds txl_kernels._native and _cuda, and the libraries of kernels beside them, with CMake and
ninja. Metadata is in pyproject.toml; torch is not needed."""

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# Why a module was not built; read by txl_kernels/backends/native_modules.py.
NOTES = {"_native": "_native_missing.txt", "_cuda": "_cuda_missing.txt"}
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
LIBRARIES = {"_native": [f"libtxl_cpu{SUFFIX}", f"libtxl_onnx{SUFFIX}"], "_cuda": [f"libtxl_cuda{SUFFIX}"]}


def compiler_asked() -> list[str]:
    """CXX as CMake reads it: a path, which may hold spaces, or a command and its options; [] for
    none."""
    asked = os.environ.get("CXX", "").strip()
    if not asked:
        os.environ.pop("CXX", None)  # CMake takes spaces for a name
        return []
    try:
        return [asked] if shutil.which(asked) else shlex.split(asked)
    except ValueError as error:
        raise SystemExit(f"CXX is no command: {error}: {asked}") from error


def compiler_missing() -> str | None:
    """Why no C++ compiler can be used; None if there is one."""
    without, asked = "txl_kernels was installed without its C++ kernels", compiler_asked()
    if sys.platform == "win32":
        return (
            f"{without}: they take GNU vector extensions, which MSVC lacks, and POSIX threads; on Windows the reference "
            "backend runs, or all of it in WSL"
        )
    commands = [asked] if asked else [["c++"], ["g++"], ["clang++"]]
    found = next((command for command in commands if shutil.which(command[0])), None)
    if found is None:
        names = ", ".join(command[0] for command in commands)
        install = "Install one (Debian: apt-get install g++) and install txl_kernels again."
        return f"{without}: no C++ compiler found ({names}). {install}"
    says = compile_fails(found, "probe.cpp", "#include <cstdint>\nint main() { return 0; }\n", "-std=c++17")
    return None if says is None else f"{without}: {' '.join(found)} cannot compile C++17: {says}"


def compile_fails(command: list[str], name: str, text: str, *options: str) -> str | None:
    """What a compiler says, in one line, of a small program that it cannot compile; None if it
    can."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, name)
        source.write_text(text)
        object_file = source.with_suffix(".o")
        try:
            done = subprocess.run(
                [*command, "-c", *options, str(source), "-o", str(object_file)], capture_output=True, text=True
            )
        except OSError as error:
            return str(error)
        if done.returncode == 0 and object_file.is_file():
            return None
    return (done.stderr.strip() or done.stdout.strip() or f"no message, exit status {done.returncode}").splitlines()[-1]


def cuda_missing() -> str | None:
    """Why the CUDA kernels are not built; None if they are. TXL_KERNELS_CUDA: auto (default: not
    for a torch without CUDA), on, off."""
    wanted = os.environ.get("TXL_KERNELS_CUDA", "auto")
    if wanted not in ("auto", "on", "off"):
        raise SystemExit(f"TXL_KERNELS_CUDA must be auto, on or off, got {wanted!r}")
    if wanted == "off":
        return "txl_kernels was built with TXL_KERNELS_CUDA=off"
    reason = (torch_without_cuda() if wanted == "auto" else None) or nvcc_does_not_work()
    if reason is not None and wanted == "on":
        raise SystemExit(f"TXL_KERNELS_CUDA=on, but {reason}")
    return None if reason is None else f"txl_kernels was built without its CUDA C++ kernels: {reason}"


def torch_without_cuda() -> str | None:
    """Why the installed torch has no use for CUDA kernels; None if it has, or there is none. torch
    is not imported: an isolated build cannot."""
    for folder in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        file = Path(folder, "torch", "version.py")
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            if re.search(r"^cuda\b[^=]*=\s*None\s*$", text, re.MULTILINE):
                version = re.search(r"^__version__ = '(.*)'$", text, re.MULTILINE)
                return f"torch {version[1] if version else ''} is built without CUDA (TXL_KERNELS_CUDA=on builds them)"
    return None


def with_emulated() -> bool:
    """Whether the kernels that emulate a unit are built, for tests. TXL_KERNELS_EMULATED: on, off
    (default)."""
    wanted = os.environ.get("TXL_KERNELS_EMULATED", "off")
    if wanted not in ("on", "off"):
        raise SystemExit(f"TXL_KERNELS_EMULATED must be on or off, got {wanted!r}")
    return wanted == "on"


def nvcc_does_not_work() -> str | None:
    """Why no CUDA source can be compiled for all the GPUs the module is for; None if it can."""
    asked = os.environ.get("CUDACXX")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [asked] if asked else ["nvcc", *(os.path.join(home, "bin", "nvcc") for home in homes if home)]
    nvcc = next(filter(None, map(shutil.which, candidates)), None)
    if nvcc is None:
        return f"no CUDA compiler found ({', '.join(candidates)}; set CUDACXX or CUDA_HOME)"
    program = "#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n__global__ void probe() {}\n"
    says = compile_fails([nvcc], "probe.cu", program, "-arch=sm_100", "-std=c++17")
    if says is not None:
        return f"{nvcc} cannot compile for sm_100, which takes CUDA 12.8 or newer: {says}"
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
        print(f"CUDA C++ kernels: {without_cuda or reason or 'built, for ' + os.environ['CUDACXX']}", flush=True)
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
        for file in self.files(name):
            (target / file).unlink(missing_ok=True)

    def files(self, name: str) -> list[str]:
        """The names of a module and of its library in the package."""
        return [Path(self.get_ext_filename(name)).name, *LIBRARIES[name]]

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
            f"-DTXL_EMULATED={'ON' if with_emulated() else 'OFF'}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        (target / "include").mkdir(exist_ok=True)
        shutil.copy(ROOT / "csrc" / "include" / "txl_attention.h", target / "include")

    def copy_extensions_to_source(self) -> None:
        """For an in-place or editable build: modules, libraries, or notes on why there are none."""
        built = Path(self.build_lib).resolve() / "txl_kernels"
        for name in (*(file for module in NOTES for file in self.files(module)), *NOTES.values()):
            source, target = built / name, ROOT / "txl_kernels" / name
            if source.exists():
                fresh = target.with_suffix(".new")
                shutil.copyfile(source, fresh)
                fresh.replace(target)  # a running process keeps the module it has mapped
            else:
                target.unlink(missing_ok=True)


compiler_asked()  # before setuptools reads it
# Where setuptools keeps its own files: beside the sources, or elsewhere if those cannot be written
# to.
scratch = {}
if not os.access(ROOT, os.W_OK):
    folder = tempfile.mkdtemp(prefix="txl-kernels-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    scratch = {"egg_info": {"egg_base": folder}, "build": {"build_base": folder}}

setup(
    options=scratch,
    ext_modules=[Extension("txl_kernels._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
