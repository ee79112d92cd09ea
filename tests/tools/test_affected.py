"""A change selects the tests that import it, directly or not, and no others."""

import subprocess
from pathlib import Path

import pytest
from affected import affected

ROOT = Path(__file__).parents[2]
SOURCES = {
    "pack/__init__.py": "from pack.api import call",
    "pack/api.py": "import importlib\n\ndef call(name):\n    return importlib.import_module(f'pack.kernels.{name}')",
    "pack/kernels/__init__.py": "",
    "pack/kernels/fast.py": "from ..shared import constant",
    "pack/shared.py": "from . import leaf",
    "pack/leaf.py": "",
    "pack/alone.py": "import os",
    "pack/text.py": "print('.')",
    ".ci/use.py": "import pack.alone",
    "benchmarks/groups/test_speed.py": "from pack import call",
    "examples/script.py": "print()",
    "tests/conftest.py": "import pack.alone",
    "tests/support/helper.py": "from pack.alone import x",
    "tests/a/conftest.py": "import helper",
    "tests/a/test_folder.py": "",
    "tests/test_api.py": "def test():\n    from pack import call",
    "tests/test_leaf.py": "import pack.leaf as leaf",
    "tests/test_text.py": "import pack.text",
    "tests/test_examples.py": "RUN = 'examples/script.py'",
    "tests/test_pages.py": 'DOCS = ROOT / "docs"',
}
API = "tests/test_api.py"


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("pack/leaf.py", [API, "tests/test_leaf.py"]),  # through a relative import, a name and a string
        ("pack/kernels/fast.py", [API]),
        ("pack/api.py", [API]),
        (
            "pack/__init__.py",
            ["tests/a/test_folder.py", API, "tests/test_leaf.py", "tests/test_text.py"],
        ),  # runs before any of its modules
        ("pack/alone.py", ["tests/a/test_folder.py"]),  # by a conftest of its folder, not by that of all tests
        ("pack/removed.py", []),
        ("tests/support/helper.py", ["tests/a/test_folder.py"]),
        ("tests/a/conftest.py", ["tests/a/test_folder.py"]),
        ("tests/test_leaf.py", ["tests/test_leaf.py"]),
        ("tests/test_removed.py", []),
        ("examples/script.py", ["tests/test_examples.py"]),
        ("docs/log.md", ["tests/test_pages.py"]),
        ("csrc/cpu/runtime.h", ["tests"]),
        ("tests/conftest.py", ["tests"]),
    ],
)
def test_selects(changed: str, tests: list[str]) -> None:
    assert affected({changed}, {path: text for path, text in SOURCES.items() if "removed" not in path}) == tests


def test_of_this_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {x: (ROOT / x).read_text(encoding="utf-8") for x in listed.stdout.split() if (ROOT / x).is_file()}
    for changed, test, other in (
        ("benchmarks/report/charts.py", "tests/benchmarks/report/test_documents.py", "tests/tools/test_aot.py"),
        ("txl_kernels/bounds.py", "tests/txl_kernels/api/test_bounds.py", "tests/tools/test_affected.py"),
    ):
        found = affected({changed}, sources)
        assert test in found
        assert other not in found
