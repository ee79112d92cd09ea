"""A torch that lacks, for this project's modules alone, the names that torch got after the oldest
version promised.

Modules of this project get proxies of torch's modules. A name that the oldest torch does not have
raises AttributeError, as it would there; torch's own code sees everything. Signatures and behaviour
are today's.

`names_of_torch.json` holds the difference of two versions of torch. To make it again, run

    python tests/support/older_torch.py > /tmp/new   # with torch 2.13
    python tests/support/older_torch.py > /tmp/old   # with torch 2.6
    python tests/support/older_torch.py /tmp/old /tmp/new > tests/support/names_of_torch.json
"""

import builtins
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "names_of_torch.json"
OURS = ("txl", "txl_kernels")
# Every module of torch that this project imports or reaches by attributes.
MODULES = (
    "torch", "torch._C", "torch._C._autograd", "torch._C._functorch", "torch._ops", "torch._subclasses.fake_tensor",
    "torch.autograd", "torch.autograd.forward_ad", "torch.autograd.function", "torch.backends",
    "torch.backends.cuda", "torch.backends.mkldnn", "torch.compiler", "torch.cuda", "torch.distributed",
    "torch.fx.traceback", "torch.jit", "torch.library", "torch.nn", "torch.nn.functional", "torch.nn.init",
    "torch.nn.modules", "torch.nn.modules.module", "torch.nn.parallel", "torch.nn.utils", "torch.onnx",
    "torch.optim", "torch.optim.lr_scheduler", "torch.utils", "torch.utils.checkpoint", "torch.utils.data",
    "torch.utils.flop_counter", "torch.utils.hooks",
)  # fmt: skip


def names() -> dict[str, list[str]]:
    """Return the names in each of `MODULES`, of the torch that is installed."""
    return {name: sorted(set(dir(importlib.import_module(name)))) for name in MODULES}


class Older(types.ModuleType):
    """A proxy of a module of torch without the names in a record."""

    def __init__(self, module: types.ModuleType, record: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_record", record)

    def __getattribute__(self, name: str) -> Any:
        module, record = (object.__getattribute__(self, own) for own in ("_module", "_record"))
        if name in record["newer"].get(module.__name__, ()):
            raise AttributeError(f"torch {record['oldest']}: module {module.__name__!r} has no attribute {name!r}")
        return older(getattr(module, name), record)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_module"), name, value)


def older(x: Any, record: dict[str, Any]) -> Any:
    """Return a proxy of a module of torch; any other value unchanged."""
    is_torchs = isinstance(x, types.ModuleType) and not isinstance(x, Older) and x.__name__.split(".")[0] == "torch"
    return Older(x, record) if is_torchs else x


def install() -> None:
    """Give modules of this project that are imported from now on the proxies.

    Raises:
        RuntimeError: the record is of another torch than the one installed.
    """
    import torch

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if not torch.__version__.startswith(record["newest"] + "."):
        raise RuntimeError(f"{RECORD.name} is of torch {record['newest']}, got {torch.__version__}: make it again")
    real = builtins.__import__

    def imported(name: str, *given: Any, **named: Any) -> Any:
        found = real(name, *given, **named)
        values = dict(zip(("globals", "locals", "fromlist", "level"), given, strict=False)) | named
        if isinstance(values.get("fromlist"), list):  # an import by torch's C++, in the frame of one of our functions
            return found
        ours = str((values.get("globals") or {}).get("__name__")).split(".")[0] in OURS
        if not ours or name.split(".")[0] != "torch" or values.get("level", 0):
            return found
        if name not in record["modules"]:
            raise ImportError(f"{name} is not in {RECORD.name}: add it to MODULES of older_torch.py and make it again")
        return older(found, record)

    builtins.__import__ = imported


def main(arguments: list[str]) -> None:
    """Print the names in the installed torch; or the record, of two files of such names."""
    import torch

    if not arguments:
        print(json.dumps({"torch": torch.__version__, "names": names()}))
        return
    old, new = (json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments)
    newer = {m: sorted(set(found) - set(old["names"][m])) for m, found in new["names"].items()}
    oldest, newest = (".".join(it["torch"].split(".")[:2]) for it in (old, new))
    record = {
        "oldest": oldest,
        "newest": newest,
        "modules": list(MODULES),
        "newer": {m: x for m, x in newer.items() if x},
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
