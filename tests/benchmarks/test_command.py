"""`pytest benchmarks/`: it prints a table; another version of the packages is timed, unless its
results are wrong."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from txl_kernels.backends import cpu, native_modules

ROOT = Path(__file__).parents[2]
FORWARD = "benchmarks/groups/test_attention.py", "--device", "cpu", "-k", "test_length and L128 and not backward"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest --benchmark-only from the root of the project, outside of this process's
    workers."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: x for name, x in os.environ.items() if "XDIST" not in name} | {"PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_table_of_what_was_measured() -> None:
    done = run(*FORWARD, "--brief", "--record", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    time = r"[\d.,]+ \[[\d.,]+, [\d.,]+\]"
    assert re.search(rf"^  rel_attention, native +{time}, \d+%$", done.stdout, re.M), done.stdout
    assert re.search(rf"^  baseline: plain SDPA +{time}, [\d.,]+x, \d+%$", done.stdout, re.M), done.stdout


@pytest.mark.nightly
def test_interpreter_needs_its_variable() -> None:
    done = run("benchmarks/", "--device", "interpreter")
    assert done.returncode != 0
    assert "--device interpreter needs TRITON_INTERPRET=1" in done.stderr


@pytest.mark.nightly
def test_base_that_cannot_be_built() -> None:
    done = run(*FORWARD, "--base=no-such-revision")
    assert done.returncode == 4
    assert "cannot compare with no-such-revision: git " in done.stderr


@pytest.mark.nightly
def test_base_is_timed_beside_this_version(tmp_path: Path) -> None:
    """A base that is as fast, then one that is wrong, which is skipped."""
    for package in ("txl", "txl_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package)
    if cpu.native.file is not None:  # an installed package's, where it is not in the tree
        for file in (cpu.native.file, native_modules.library_of("_native", cpu.native.file)):
            shutil.copy(file, tmp_path / "txl_kernels")
    done = run(*FORWARD, f"--base={tmp_path}", "--brief")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    with (tmp_path / "txl_kernels" / "backends" / "cpu.py").open("a") as file:
        file.write(
            "right = forward\ndef forward(*call):\n    out, lse = right(*call)\n    return out.mul_(1.001), lse\n"
        )
    done = run(*FORWARD, f"--base={tmp_path}", "--brief")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert f"{tmp_path}: AssertionError: out is wrong" in done.stdout
