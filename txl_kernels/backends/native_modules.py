"""The compiled modules of this package, and why one is not there."""

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = PACKAGE.parent / "csrc"  # in a source tree


@dataclass
class NativeModule:
    """txl_kernels.<name> and the file it came from; both None where it cannot be used, and why."""

    module: Any = None
    file: Path | None = None
    why_not_loaded: str | None = None


def load(name: str, language: str) -> NativeModule:
    """A module of this copy of the package; in a source tree that has none of its own, the
    installed package's if it was built from the tree's sources."""
    errors = []
    for folder in (PACKAGE, *_installed()):
        file = _file_of(name, folder)
        note = folder / f"{name}_missing.txt"  # of setup.py
        if file is None:
            if note.is_file():
                errors.append(note.read_text(encoding="utf-8").strip())
            continue
        try:
            module = _import(name, file)
        except ImportError as error:
            errors.append(f"the {language} module could not be loaded: {error}")
            continue
        if _is_of_this_source(name, module):
            connect(module)
            return NativeModule(module, file)
        errors.append(_left_behind(language, file))
    return NativeModule(why_not_loaded=errors[0] if errors else _nowhere(language))


def _file_of(name: str, folder: Path) -> Path | None:
    files = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _import(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"txl_kernels.{name}", file)
    assert spec is not None  # its suffix is an extension module's
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def torch_library() -> ctypes.CDLL | None:
    """Torch's own library, which is loaded already: a search in it follows its dependencies, and no
    other package's copy can be mistaken for them."""
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError:
        return None


def address_of(name: str) -> int:
    """The address of a function in torch's library or its dependencies; 0 if there is none."""
    function = getattr(torch_library(), name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def connect(module: Any) -> None:
    """Tells a module where the C functions are by which torch describes tensors.

    Without them, or if what they say of a tensor is not what Python says, it asks Python.
    """
    module.set_torch_functions([address_of(name) for name in module.TORCH_FUNCTIONS])
    x = torch.frombuffer(bytearray(24), dtype=torch.float32)
    if module.facts(x) != (tuple(x.shape), x.stride(), x.data_ptr()):
        module.set_torch_functions([0] * len(module.TORCH_FUNCTIONS))


def in_source_tree() -> bool:
    """Whether this copy of the package lies beside its C++ sources."""
    return (SOURCES / "attention.h").is_file()


def _is_of_this_source(name: str, module: Any) -> bool:
    """Whether it takes the calls of this source, and is of the C++ sources where those are
    there."""
    return vars(module).get("FIELDS") == Call._fields and (
        not in_source_tree() or vars(module).get("SOURCE_HASH") == source_hash(SOURCES, name)
    )


def _installed() -> Iterator[Path]:
    """Folders of the installed package, asked from a source tree: another copy than this."""
    for distribution in importlib.metadata.distributions(name="txl-kernels") if in_source_tree() else ():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")  # pip's
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(url2pathname(urlsplit(origin["url"]).path)) / "txl_kernels"
        else:
            folder = Path(str(distribution.locate_file("txl_kernels")))
        if folder.resolve() != PACKAGE:
            yield folder.resolve()


def _left_behind(language: str, file: Path) -> str:
    if file.parent == PACKAGE:
        return f"the {language} module {file} was built from another version of the source; install the package again"
    return (
        f"this is the source tree {PACKAGE.parent}, where the {language} module is not built, and the installed one, "
        f"{file}, was built from other sources: `pip install .` in this tree brings it up to date"
    )


def _nowhere(language: str) -> str:
    if in_source_tree():
        return (
            f"this is the source tree {PACKAGE.parent}, where the {language} module is not built, and no installed "
            "package has it: `pip install .` in this tree builds it"
        )
    return f"the {language} module is not in {PACKAGE}; install the package again"
