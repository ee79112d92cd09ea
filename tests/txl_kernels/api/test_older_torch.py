"""No module of this project uses a name that torch got after the oldest supported version.

`tests/support/names_of_torch.json` holds the difference of two versions. To make it again, run this
file as a program with each torch, into a file, and then with both files as arguments.
"""

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "tests" / "support" / "names_of_torch.json"
# The modules of torch that this project imports or reaches by attributes.
MODULES = (
    "torch", "torch._C", "torch._C._autograd", "torch._C._functorch", "torch._ops", "torch._subclasses.fake_tensor",
    "torch.autograd", "torch.autograd.forward_ad", "torch.autograd.function", "torch.backends", "torch.backends.cuda",
    "torch.backends.mkldnn", "torch.compiler", "torch.cuda", "torch.distributed", "torch.distributed.rendezvous",
    "torch.fx", "torch.fx.experimental.symbolic_shapes", "torch.fx.traceback", "torch.jit",
    "torch.library", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.nn.attention.flex_attention",
    "torch.nn.modules", "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.utils",
    "torch.nn.utils.parametrize", "torch.onnx", "torch.optim", "torch.optim.lr_scheduler", "torch.overrides",
    "torch.utils", "torch.utils.checkpoint", "torch.utils.data",
    "torch.utils.flop_counter", "torch.utils.hooks",
)  # fmt: skip


def uses(source: str) -> tuple[set[str], set[str]]:
    """Return the modules that a module imports, and the dotted names that it uses; names for which
    it asks hasattr or getattr are left out."""
    tree = ast.parse(source)
    asked = set(re.findall(r'(?:hasattr|getattr)\([\w.]+, "(\w+)"', source))
    modules: set[str] = set()
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {x.name for x in node.names}
            local |= {x.asname: x.name for x in node.names if x.asname}
            local |= {x: x for x in (y.name.split(".")[0] for y in node.names if not y.asname)}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
            local |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
    names = set(local.values())
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        if isinstance(node, ast.Name) and parts:
            names.add(".".join([local.get(node.id, ""), *parts]))
    return modules, {name for name in names if name.split(".")[-1] not in asked}


def newer(name: str, record: dict[str, Any]) -> bool:
    """Whether the oldest torch lacks a part of a dotted name other than a submodule."""
    parts = name.split(".")
    owners = ((".".join(parts[:n]), parts[n]) for n in range(1, len(parts)))
    return any(x in record["newer"].get(owner, ()) and f"{owner}.{x}" not in MODULES for owner, x in owners)


@pytest.mark.parametrize("package", ["txl_kernels", "txl"])
def test_no_name_is_newer_than_the_oldest_torch(package: str) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for path in (ROOT / package).rglob("*.py"):
        if path.parent.name == "hf":  # transformers requires a newer torch itself
            continue
        modules, names = uses(path.read_text(encoding="utf-8"))
        assert {x for x in modules if x.split(".")[0] == "torch"} <= {*MODULES, "torch.utils.tensorboard"}, path
        assert not [name for name in names if newer(name, record)], path


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.compiler.is_exporting()", "from torch.compiler import is_exporting",
     "from torch import compiler as c\ndef f():\n  return c.is_exporting", "import torch.compiler as c\nc.is_exporting()"],
)  # fmt: skip
def test_newer_names_are_found(source: str) -> None:
    """torch.compiler.is_exporting came with torch 2.7."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [name for name in uses(source)[1] if newer(name, record)] == ["torch.compiler.is_exporting"]


def test_record_is_of_the_oldest_supported_torch() -> None:
    promised = re.search(r'"torch>=([0-9.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert promised is not None
    assert (record["oldest"], record["modules"]) == (promised[1], list(MODULES))


def main(arguments: list[str]) -> None:
    """Print the names in the installed torch; or the record, of two files of such names."""
    import torch

    if not arguments:
        names = {name: sorted(set(dir(importlib.import_module(name)))) for name in MODULES}
        print(json.dumps({"torch": torch.__version__, "names": names}))
        return
    old, new = (json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments)
    found = {m: sorted(set(names) - set(old["names"][m])) for m, names in new["names"].items()}
    oldest, newest = (".".join(it["torch"].split(".")[:2]) for it in (old, new))
    record = {"oldest": oldest, "newest": newest, "modules": list(MODULES)}
    print(json.dumps(record | {"newer": {m: x for m, x in found.items() if x}}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
