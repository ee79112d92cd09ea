"""Builds txl_kernels._native with CMake and ninja. Metadata is in pyproject.toml; torch is not needed to build."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NOTE = "_native_missing.txt"  # read by txl_kernels.native.missing()


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


class CMakeBuild(build_ext):
    """Configures and builds the one extension, and puts it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        target.mkdir(parents=True, exist_ok=True)
        reason = compiler_missing()
        if reason is not None:
            # A GPU or reference user needs no C++ kernels, so the install goes on; the package says what is missing.
            print(f"WARNING: {reason}", file=sys.stderr)
            (target / NOTE).write_text(reason + "\n", encoding="utf-8")
            return
        (target / NOTE).unlink(missing_ok=True)
        import pybind11

        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DPYBIND11_FINDPYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)

    def copy_extensions_to_source(self) -> None:
        """For an in-place or editable build: the module, or the note on why there is none."""
        built = Path(self.build_lib).resolve() / "txl_kernels"
        for name in (self.get_ext_filename("_native"), NOTE):
            source, target = built / name, ROOT / "txl_kernels" / name
            if source.exists():  # one of the two always does
                fresh = target.with_suffix(".new")
                shutil.copyfile(source, fresh)
                fresh.replace(target)  # a running process keeps the module it has mapped
            else:
                target.unlink(missing_ok=True)


setup(
    ext_modules=[Extension("txl_kernels._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
