"""Print the tests that import, directly or not, a file that differs from a revision.

`python tools/affected.py REVISION` compares the tree with its merge base with REVISION. A file that
nothing imports affects the tests that name it or its top folder; one that all need prints `tests`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

ROOTS = ("tests/support/", "tests/integrations/", "tests/fuzz/", "benchmarks/", "tools/", "")  # pytest's pythonpath
EVERYTHING = ("csrc/", "CMakeLists.txt", "setup.py", "pyproject.toml", "requirements.txt", "tests/conftest.py")


def module(path: str) -> str:
    """Return the dotted name by which a Python file is imported."""
    root = next(root for root in ROOTS if path.startswith(root))
    return path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: str, text: str) -> Iterator[str]:
    """Yield the modules a file imports, imported names that may be modules, and strings like
    "package.module"."""
    package = module(path) if path.endswith("/__init__.py") else module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = resolve_name("." * getattr(node, "level", 0) + (getattr(node, "module", "") or ""), package)
            yield from (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value[1:]:
            yield node.value  # ends with a dot in import_module(f"package.{name}")


def affected(changed: set[str], sources: dict[str, str]) -> list[str]:
    """Return the test files among `sources` (path: text) that the changed paths affect, or
    ["tests"] for all."""
    if any(path.startswith(EVERYTHING) for path in changed):
        return ["tests"]
    tests, paths = {path for path in sources if path.startswith("tests/") and "/test_" in path}, {*changed, *sources}
    modules = {module(path): path for path in paths if path.endswith(".py")}
    users = {path: {x for x in tests if x.startswith(path.removesuffix("conftest.py"))} for path in paths}
    for user in sources.keys() - {"tests/conftest.py"}:  # loaded by every test
        for name in set(imported(user, sources[user])):
            for other in [x for x in modules if x.startswith(name)] if name.endswith(".") else modules.keys() & {name}:
                users[modules[other]].add(user)
    found = {path for path in changed if users[path]}  # importing any module of a package runs its __init__.py
    found |= {x for path in found if path.endswith("/__init__.py") for x in sources if x.startswith(path[:-11])}
    for path in changed - found:
        named = path.split("/")[-1], f'"{path.split("/")[0]}"'
        found |= {test for test in tests if any(name in sources[test] for name in named)}
    while more := set[str]().union(*(users[path] for path in found)) - found:
        found |= more
    return sorted(found & tests)


if __name__ == "__main__":
    commands = f"diff --name-only --merge-base {sys.argv[1]}", "ls-files -o --exclude-standard", "ls-files"
    diff, new, old = (subprocess.check_output(["git", *x.split()], text=True).splitlines() for x in commands)
    texts = {x: Path(x).read_text("utf-8") for x in {*new, *old} if x.endswith(".py") and Path(x).is_file()}
    print(*affected({*diff, *new}, texts), sep="\n")
