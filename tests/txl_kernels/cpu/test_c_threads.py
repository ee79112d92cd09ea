"""The C library in a program whose threads are cancelled, whose function throws or makes calls,
which unloads the library, or which calls it at its end."""

import subprocess
from pathlib import Path

import pytest
from builds import ROOT, once

from txl_kernels.backends import cpu, native_modules

LIBRARY = native_modules.library_of("_native", cpu.native.file)
INCLUDE = ROOT / "csrc" / "include"
SOURCE = Path(__file__).with_name("threads.cpp")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{INCLUDE}"]


def compile_program(folder: Path) -> None:
    subprocess.run(["c++", *FLAGS, str(SOURCE), "-ldl", "-lpthread", "-o", str(folder / "threads")], check=True)


@pytest.mark.parametrize("name", ["cancelled", "throwing", "nested", "unloaded", "at_the_end"])
def test_program_goes_on_and_gets_its_results(name: str) -> None:
    folder = once("c_threads", [SOURCE, INCLUDE], FLAGS, "c++", compile_program)
    done = subprocess.run(
        [str(folder / "threads"), str(LIBRARY), name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
