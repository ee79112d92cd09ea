"""Building the package: compilers that the user names, units for tests alone, and read-only
sources."""

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or ""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def build(folder: Path, cxx: str | None) -> tuple[subprocess.CompletedProcess[str], str | None]:
    """Run `build_ext` with a cmake that only prints its arguments; return the finished process, and
    the note on why there is no module."""
    script(folder / "bin" / "cmake", 'echo "cmake with [${CXX-unset}]" "$@"')
    environment = dict(os.environ, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", TXL_KERNELS_CUDA="off")
    environment.pop("CXX", None)
    if cxx is not None:
        environment["CXX"] = cxx
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", str(folder / "lib"), "-t", str(folder / "temp")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    note = folder / "lib" / "txl_kernels" / "_native_missing.txt"
    return done, note.read_text(encoding="utf-8").strip() if note.exists() else None


def test_no_cuda_kernels_beside_a_torch_for_rocm(tmp_path: Path) -> None:
    """With TXL_KERNELS_CUDA=auto. The build says so."""
    script(tmp_path / "bin" / "cmake", 'echo "cmake with" "$@"')
    script(tmp_path / "bin" / "nvcc", 'while [ "$1" != -o ]; do shift; done; : > "$2"')  # one that works
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "__version__ = '2.12.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n"
    )
    code = f"""
import runpy, sys, sysconfig
sysconfig.get_path, sys.argv = (lambda name, get_path=sysconfig.get_path: {str(tmp_path)!r} if name in ("purelib",
    "platlib") else get_path(name)), {["setup.py", "-q", "build_ext", "-b", str(tmp_path / "lib"), "-t", str(tmp_path)]!r}
runpy.run_path("setup.py", run_name="__main__")
"""
    environment = dict(os.environ, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", TXL_KERNELS_CUDA="auto")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    reason = "torch 2.12.0+rocm7.1 is built without CUDA (TXL_KERNELS_CUDA=on builds them)"
    assert f"CUDA C++ kernels: txl_kernels was built without its CUDA C++ kernels: {reason}" in done.stdout, done.stderr
    assert "-DTXL_CUDA=OFF" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (COMPILER and shutil.which("cmake") and shutil.which("ninja")), reason="needs the tools to build"
)
def test_build_in_a_folder_with_commas_and_parentheses(tmp_path: Path) -> None:
    """With empty sources, by the compiler's and the linker's real commands."""
    pytest.importorskip("pybind11")
    tree = tmp_path / "Smith, John, txl-kernels (1) @a@ & é"
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    for file in (tree / "csrc").rglob("*.cpp"):
        file.write_text("")
    for name in ("CMakeLists.txt", "README.md", "pyproject.toml", "setup.py", "txl_kernels/backends/source_hash.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", "lib", "-t", "temp"]
    environment = os.environ | {"TXL_KERNELS_CUDA": "off", "CMAKE_ARGS": ""}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-1000:]
    built = {file.name.partition(".")[0] for file in (tree / "lib" / "txl_kernels").iterdir()}
    assert built >= {"_native", "libtxl_cpu", "libtxl_onnx"}


@pytest.mark.parametrize("cxx", [None, "", "  "])
def test_default_compiler(tmp_path: Path, cxx: str | None) -> None:
    done, note = build(tmp_path, cxx)
    assert done.returncode == 0, done.stderr
    assert "cmake with [unset]" in done.stdout
    assert note is None


def test_compiler_with_an_option_in_a_folder_with_a_space(tmp_path: Path) -> None:
    """A compiler without an option is used by .ci/check_wheel."""
    compiler = script(tmp_path / "my tools" / "c++", f'exec {COMPILER} "$@"')
    cxx = f"'{compiler}' -O1"
    done, note = build(tmp_path, cxx)
    assert done.returncode == 0, done.stderr
    assert f"cmake with [{cxx}]" in done.stdout
    assert note is None


@pytest.mark.parametrize(
    ("cxx", "why"),
    [
        ("/bin/false", "/bin/false cannot compile C++17: no message, exit status 1"),
        ("/bin/true", "/bin/true cannot compile C++17: no message, exit status 0"),
        ("/nonexistent/c++ -O2", "no C++ compiler found (/nonexistent/c++). Install one"),
    ],
)
def test_compiler_that_does_not_compile(tmp_path: Path, cxx: str, why: str) -> None:
    """The package is installed without kernels, and a warning gives the reason."""
    done, note = build(tmp_path, cxx)
    assert done.returncode == 0, done.stderr
    assert "cmake with" not in done.stdout
    assert note.startswith("txl_kernels was installed without its C++ kernels: ")
    assert why in note
    assert done.stderr.strip().endswith(f"WARNING: {note}")


def test_windows_installs_without_kernels() -> None:
    with mock.patch("setuptools.setup"):
        compiler_missing = runpy.run_path(str(ROOT / "setup.py"))["compiler_missing"]
    assert compiler_missing() is None
    with mock.patch("sys.platform", "win32"):
        why = compiler_missing()
    assert why.startswith("txl_kernels was installed without its C++ kernels: they take GNU vector extensions")


def test_emulated_units_are_built_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TXL_KERNELS_EMULATED", "on")
    done, _ = build(tmp_path, None)
    assert "-DTXL_EMULATED=ON" in done.stdout.split()


@pytest.mark.parametrize(("cxx", "emulated", "message"), [
    ("g++ 'x", "off", "CXX is no command: No closing quotation: g++ 'x\n"),
    (None, "1", "TXL_KERNELS_EMULATED must be on or off, got '1'\n"),
], ids=["CXX", "TXL_KERNELS_EMULATED"])  # fmt: skip
def test_invalid_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str | None, emulated: str, message: str
) -> None:
    monkeypatch.setenv("TXL_KERNELS_EMULATED", emulated)
    done, _ = build(tmp_path, cxx)
    assert (done.returncode, done.stderr) == (1, message)


def test_read_only_source_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    for name in ("csrc", "txl", "txl_kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "*_missing.txt", "__pycache__"))
    before = sorted(tree.rglob("*"))
    for path in (tree, *before):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # Root may write anywhere without these capabilities dropped.
    without_rights = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path, tree]
    environment = dict(os.environ, CXX="/bin/false", TXL_KERNELS_CUDA="off")
    done = subprocess.run([*without_rights, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"txl/recipes/laptop.json", "txl_kernels/_native_missing.txt", "txl_kernels/py.typed"} <= set(names)
    assert sorted(tree.rglob("*")) == before
    for path in (tree, *before):  # so that pytest can remove the folder
        path.chmod(0o755)
