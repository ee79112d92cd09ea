"""A pytest plugin for `make test-slow`: skips slow proofs that have passed with the same code and
compilers, and records that they have. Each family of kernels has its own record.

    python tests/support/proofs.py FAMILY           exits with 0 if the family has passed, else 1
    python tests/support/proofs.py FAMILY passed    records that it has, for what is no test
"""

import ast
import functools
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
from builds import ROOT

RECORD = ROOT / "tests" / "slow_proofs.json"
NO_FAULT = "none runs in"  # why a test of planted faults is skipped whose faults are not in the compiled code
NO_GPU = "needs a GPU"  # why a test on a device is skipped, which no record is of
CUDA, TRITON = "tests/txl_kernels/cuda/", "tests/txl_kernels/triton/"


class Family(NamedTuple):
    """Kernels whose proofs run again together.

    Attributes:
        tests: files with slow proofs; none for a family that a command compares.
        sources: files and folders whose code the proofs run; what they import or include is found.
        compiler: nvcc, triton, or c++.
    """

    tests: tuple[str, ...]
    sources: tuple[str, ...]
    compiler: str


EXECUTOR = "tools/ptx/instructions"  # imported by name; it imports the others of tools/ptx
ALL_CUDA = (
    EXECUTOR, "csrc/cuda/*.*", "csrc/python", f"{CUDA}*.h", f"{CUDA}ptx_launch", "txl_kernels/backends/cuda.py"
)  # fmt: skip
# The way of a call to the compiled modules; layers, caches and tables are above it.
CALLS = ("call", "checks", "composed", "functional", "operators", "prepare", "seed", "torch_state", "backends/*")
CALLERS = tuple(f"txl_kernels/{x}.py" for x in CALLS)
CPU = ("csrc/*.h", "csrc/include", "csrc/cpu", "csrc/python")
BUILD = ("CMakeLists.txt", "setup.py", "pyproject.toml", "txl_kernels/backends/source_hash.py")
ON_CPU = "tests/txl_kernels/cpu/"
SANITIZED = tuple(re.findall(r"tests/\S+\.py", (ROOT / ".ci/sanitize").read_text()))
FAMILIES = {
    "decode": Family(
        (f"{CUDA}test_ptx.py", f"{CUDA}test_planted.py", f"{CUDA}test_module.py"),
        (*ALL_CUDA, "csrc/cuda/decode", f"{CUDA}driver.cpp"),
        "nvcc",
    ),
    "hopper": Family(
        (f"{CUDA}test_hopper_ptx.py", f"{CUDA}test_hopper_variants.py"), (*ALL_CUDA, "csrc/cuda/hopper"), "nvcc"
    ),
    "triton": Family(
        tuple(f"{TRITON}test_{x}.py" for x in ("launch", "ptx", "ptx_planted")),
        (EXECUTOR, "txl_kernels/backends/triton"),
        "triton",
    ),
    # Without tests of their own: steps of .ci/run.
    "machine code of cuda": Family(
        (),
        (*ALL_CUDA[1:3], "csrc/cuda/decode", "csrc/cuda/hopper", "CMakeLists.txt", "setup.py", "tools/machine_code.*"),
        "nvcc",
    ),
    "machine code of triton": Family(
        (),
        (
            "txl_kernels/backends/triton",
            "tools/machine_code.*",
            f"{TRITON}test_ptx.py",
            f"{TRITON}test_kept.py",
            ".ci/tritons",
        ),
        "triton",
    ),
    "interpreter": Family((), ("txl_kernels/backends/triton", "tests/txl_kernels/api/test_values.py"), "triton"),
    # In an emulation of CUDA, on an emulated Arm processor and under ThreadSanitizer.
    "emulation": Family(
        (f"{CUDA}test_values.py", f"{CUDA}test_hopper.py"),
        (*ALL_CUDA[1:], "csrc/*.h", "csrc/cuda/decode", "csrc/cuda/hopper", f"{CUDA}driver.cpp", *CALLERS),
        "c++",
    ),
    "drivers": Family((f"{ON_CPU}test_driver.py",), (*CPU, f"{ON_CPU}*.cpp", *CALLERS), "c++"),
    # Without tests of their own.
    "sanitizers": Family(
        (),
        (*CPU, *CALLERS, *BUILD, *SANITIZED, f"{ON_CPU}program.c", ".ci/sanitize"),
        "c++",
    ),
    "wheel": Family(
        (),
        (
            "csrc",
            *CALLERS,
            *BUILD,
            "MANIFEST.in",
            "requirements*.txt",
            "tools/build_wheel.py",
            ".ci/*_wheel",
            ".ci/use.py",
        ),
        "c++",
    ),
}
# Text in quotes, which may hold what looks like a comment; comments, of which those that mark the
# line of a planted fault are kept. A quote behind a letter or digit separates digits.
_CPP = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'|//\ plant:[^\n]*)|//[^\n]*|/\*.*?\*/""",
    re.DOTALL | re.VERBOSE,
)


def without_comments(name: str, text: str) -> str:
    """Return the text of a file of Python, C++ or CUDA without its comments, docstrings and empty
    lines."""
    if name.endswith(".py"):
        return _python_without_comments(text)
    if not name.endswith((".h", ".cpp", ".cu", ".cuh")):
        return text
    left = _CPP.sub(lambda found: found["kept"] or " ", text)
    return "\n".join(line.rstrip() for line in left.splitlines() if line.strip())


def _docstring_lines(text: str) -> set[int]:
    """Return the lines, counted from 0, that docstrings have for themselves."""
    lines, found = text.encode().splitlines(), set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        doc = node.body[0]
        first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
        if not (lines[first][: doc.col_offset] + lines[last][doc.end_col_offset :]).strip():
            found.update(range(first, last + 1))
    return found


def _python_without_comments(text: str) -> str:
    # By position: tokens of the same f-string differ between versions of Python.
    lines, ends, docs = text.splitlines(), set(), _docstring_lines(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.NL:
            ends.add(row - 1)
    return "\n".join(line for row, line in enumerate(lines) if row not in docs and (line or row not in ends))


def _imported(file: Path) -> set[Path]:
    """Return the files of tests/support and tools that a file of Python imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names |= {f"{node.module}.{x.name}" for x in node.names}  # a module, or a name in one
    parts = [name.split(".") for name in names]
    modules = {"/".join(x[:n]) for x in parts for n in range(1, len(x) + 1)}
    places = (ROOT / "tests/support", ROOT / "tools")
    return {
        x for place in places for m in modules for x in (place / f"{m}.py", place / m / "__init__.py") if x.exists()
    }


@functools.cache
def _used(file: Path) -> set[Path]:
    """Return the project's files that a file imports or includes."""
    if file.suffix == ".py":
        return _imported(file)
    included = (file.parent / x for x in re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE))
    return {x.resolve() for x in included if x.exists()}


def sources(family: Family) -> list[Path]:
    """Return the files that a family's proofs depend on."""
    given = [x for pattern in (*family.tests, *family.sources) for x in ROOT.glob(pattern)]
    pending = {x for path in given for x in ([path] if path.is_file() else path.rglob("*.*")) if x.suffix != ".pyc"}
    found: set[Path] = set()
    while pending:
        found.add(file := pending.pop())
        pending |= _used(file) - found
    return sorted(found)


def _version(compiler: str) -> str | None:
    """Return a compiler's version; None without it."""
    if compiler != "triton":
        if shutil.which(compiler) is None:
            return None
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    try:
        return importlib.metadata.version(compiler)
    except importlib.metadata.PackageNotFoundError:
        return None


def hash_of_code(files: list[Path], version: str) -> str:
    """Return 16 hexadecimal digits of the names of files, of their code, and of a compiler's
    version."""
    found = hashlib.sha256(version.encode())
    for file in files:
        code = without_comments(file.name, file.read_text())
        found.update(f"\n{file.relative_to(ROOT)} {len(code)}\n{code}".encode())
    return found.hexdigest()[:16]


def present() -> dict[str, str]:
    """Return the hash of each family whose compiler this machine has."""
    versions = {name: _version(family.compiler) for name, family in FAMILIES.items()}
    return {name: hash_of_code(sources(FAMILIES[name]), x) for name, x in versions.items() if x is not None}


def family_of(nodeid: str) -> str | None:
    """Return the family that a test belongs to; None for one of no family, which always runs."""
    file = nodeid.partition("::")[0]
    return next((name for name, family in FAMILIES.items() if file in family.tests), None)


def recorded() -> dict[str, str]:
    """Return the hash of each family as it was when the family passed."""
    found: dict[str, str] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def record(passed: dict[str, str]) -> None:
    RECORD.write_text(json.dumps(recorded() | passed, indent=1) + "\n")


class Proofs:
    """The outcomes of a session's proofs; each phase of a test that did not pass counts."""

    def __init__(self) -> None:
        self.present = present()
        self.recorded = recorded()
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out files without a slow test: collecting all of them takes half a minute."""
        if not collection_path.match("test_*.py"):
            return None
        text = collection_path.read_text()
        return None if "mark.slow" in text or "RUNS_TRITONS_PTX" in text else True

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            name = family_of(item.nodeid)
            if item.get_closest_marker("gpu") is not None:
                continue
            if name in self.present and self.recorded.get(name) == self.present[name]:
                reason = f"passed with the same code and compiler: {name} in {RECORD.name}"
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = family_of(report.nodeid)
        reason = str(report.longrepr) if report.outcome == "skipped" else ""
        if name is None or NO_FAULT in reason or NO_GPU in reason:
            return
        if report.when == "call" or not report.passed:
            self.outcomes[name][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        if hasattr(config, "workerinput") or config.args != ["tests"] or config.option.keyword or exitstatus != 0:
            return
        passed = {name: x for name, x in self.present.items() if set(self.outcomes[name]) == {"passed"}}
        if passed:
            record(passed)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Proofs())


if __name__ == "__main__":
    name, *passed = sys.argv[1:]
    here = present().get(name)
    if passed and here is not None:
        record({name: here})
    sys.exit(0 if here is not None and recorded().get(name) == here else 1)
