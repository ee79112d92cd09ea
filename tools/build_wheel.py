"""Builds one wheel for Linux x86-64 that serves every CPython at hand: `make wheel`.

The wheel holds the libraries of kernels once, and for each Python a module that calls them.
auditwheel says on which systems it loads; it may need nothing newer than manylinux 2.28.
"""

import argparse
import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheel"
VERSIONS = tuple(f"3.{minor}" for minor in range(10, 15))
MAX_GLIBC, MAX_BYTES = (2, 28), 8_000_000
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBRARIES = {"_native": "libtxl_cpu.so", "_cuda": "libtxl_cuda.so"}


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version that has headers: of the PATH, or of pyenv."""
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))]
    code = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('include'))"
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        found = done.stdout.strip().split(" ", 2)
        if done.returncode == 0 and ".".join(found[:2]) == version and Path(found[2], "Python.h").is_file():
            return Path(candidate)
    return None


def unpack_first(folder: Path, wheel: Path | None) -> Path:
    """Unpack this Python's wheel, and build it, as `pip install .` does, if there is none; return
    its folder."""
    first = BUILD / "first"
    for stale in (folder, first, *BUILD.glob("lib*"), *BUILD.glob("bdist*")):
        shutil.rmtree(stale, ignore_errors=True)
    if wheel is None:
        build = ["build", "--build-base", str(BUILD), "bdist_wheel", "--dist-dir", str(first)]
        run(sys.executable, "setup.py", "-q", *build)
        [wheel] = first.glob("*.whl")
    run(sys.executable, "-m", "wheel", "unpack", "-d", str(folder), str(wheel))
    [unpacked] = folder.iterdir()
    return unpacked


def build_modules(python: Path, version: str, names: list[str], package: Path) -> None:
    """Build the modules of these names for another Python, and put them into the package."""
    import pybind11

    build = BUILD / version
    options = {
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": package,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "PYBIND11_FINDPYTHON": "ON",
        "Python_EXECUTABLE": python,
    }
    run("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", *(f"-D{n}={x}" for n, x in options.items()))
    run("cmake", "--build", str(build), "--target", *names)


def run(*command: str) -> None:
    tools = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PATH": tools})


def pack(unpacked: Path, folder: Path) -> Path:
    """Write the wheel, with the tag that auditwheel finds; return its file."""
    run(sys.executable, "-m", "wheel", "pack", "-d", str(unpacked.parent), str(unpacked))
    [wheel] = unpacked.parent.glob("*.whl")
    run(sys.executable, "-m", "wheel", "tags", "--remove", "--python-tag", "py3", "--abi-tag", "none", str(wheel))
    [wheel] = unpacked.parent.glob("*.whl")
    for old in folder.glob("txl_kernels-*-py3-none-manylinux*.whl"):
        old.unlink()
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(folder), str(wheel))
    [wheel] = folder.glob("txl_kernels-*-py3-none-manylinux*.whl")
    return wheel


def why_not_published(wheel: Path) -> str | None:
    """Return what makes the wheel unfit for other systems, or None."""
    glibc = min(tuple(map(int, found)) for found in re.findall(r"manylinux_(\d+)_(\d+)", wheel.name))
    if glibc > MAX_GLIBC:
        return f"it needs glibc {glibc[0]}.{glibc[1]}, where {MAX_GLIBC[0]}.{MAX_GLIBC[1]} is accepted"
    size = wheel.stat().st_size
    return f"it has {size} bytes, where {MAX_BYTES} are accepted" if size > MAX_BYTES else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--only", nargs="+", default=VERSIONS, metavar="VERSION", help="versions of Python")
    parser.add_argument("--cuda-library", type=Path, help="libtxl_cuda.so of the same sources, instead of building one")
    parser.add_argument("--wheel", type=Path, help="this Python's wheel of the same sources, instead of building one")
    given = parser.parse_args()
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit("make wheel builds for Linux x86-64; `make wheels` builds for other systems")
    if given.cuda_library is not None:
        os.environ["TXL_KERNELS_CUDA"] = "off"
    unpacked = unpack_first(BUILD / "unpacked", given.wheel)
    package = unpacked / "txl_kernels"
    if given.cuda_library is not None:
        shutil.copy(given.cuda_library, package / LIBRARIES["_cuda"])
        (package / "_cuda_missing.txt").unlink()
    names = [name for name, library in LIBRARIES.items() if (package / library).is_file()]
    if "_native" not in names:
        raise SystemExit((package / "_native_missing.txt").read_text(encoding="utf-8").strip())
    pythons = {version: Path(sys.executable) if version == OWN else find_python(version) for version in given.only}
    for version, python in pythons.items():
        missing = [n for n in names if version != OWN or not any(package.glob(f"{n}.*.so"))]
        if python is not None and missing:
            build_modules(python, version, missing, package)
    wheel = pack(unpacked, given.out)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB, {' and '.join(LIBRARIES[name] for name in names)}")
    for version, python in pythons.items():
        print(
            f"  Python {version}: {f'built, by {python}' if python else 'not built: no interpreter with headers found'}"
        )
    if (reason := why_not_published(wheel)) is not None:
        raise SystemExit(f"{wheel.name} cannot be published: {reason}")


if __name__ == "__main__":
    main()
