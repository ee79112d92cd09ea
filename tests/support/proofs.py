"""A pytest plugin for `make test-slow`: skips slow proofs of GPU code that have passed with the
same sources and compilers, and records that they have."""

import ast
import importlib.metadata
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from builds import ROOT, hash_of

RECORD = ROOT / "tests" / "slow_proofs.json"
PROOFS = ("tests/txl_kernels/cuda/", "tests/txl_kernels/triton/", "tests/tools/ptx/")
NO_FAULT = "none runs in"  # why a test of planted faults is skipped whose faults are not in the compiled code
SOURCES = (
    *PROOFS, "csrc/cuda", "csrc/python", "tools/ptx", "tools/pretended_gpu.py", "tools/machine_code.py",
    "txl_kernels/backends/cuda.py", "txl_kernels/backends/triton",
)  # fmt: skip


def helpers() -> list[Path]:
    """Return the files of tests/support that the proofs import, directly or through each other."""
    support = ROOT / "tests" / "support"
    pending = [file for folder in PROOFS for file in (ROOT / folder).rglob("*.py")]
    found: set[Path] = set()
    while pending:
        for node in ast.walk(ast.parse(pending.pop().read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            files = {support / f"{name}.py" for name in names}
            new = {x for x in files if x.exists()} - found
            found |= new
            pending += new
    return sorted(found)


def present() -> dict[str, str] | None:
    """Return the hash and versions of a proof on this machine; None without the compilers."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    if shutil.which("nvcc") is None:
        return None
    return {"triton": triton, "sources and nvcc": hash_of([*(ROOT / x for x in SOURCES), *helpers()], triton, ["nvcc"])}


class Proofs:
    """The outcomes of a session's proofs; each phase of a test that did not pass counts."""

    def __init__(self) -> None:
        self.present = present()
        self.outcomes: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.present is None or not RECORD.exists() or json.loads(RECORD.read_text()) != self.present:
            return
        for item in items:
            if item.nodeid.startswith(PROOFS):
                item.add_marker(pytest.mark.skip(reason=f"passed with the same sources and compilers: {RECORD.name}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "skipped" and NO_FAULT in str(report.longrepr):
            return
        if report.nodeid.startswith(PROOFS) and (report.when == "call" or not report.passed):
            self.outcomes[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        config = session.config
        is_whole = not hasattr(config, "workerinput") and config.args == ["tests"] and not config.option.keyword
        if is_whole and exitstatus == 0 and self.present is not None and set(self.outcomes) == {"passed"}:
            RECORD.write_text(json.dumps(self.present, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Proofs())
