"""Loading of the package's compiled modules and of the libraries beside them, and the reason if one
is missing.

A library holds kernels and knows nothing of Python; a module, one for each version of Python, calls
it. The library is loaded by its path, so each copy of the package in a process has its own.
"""

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import torch

from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = PACKAGE.parent / "csrc"  # exists only in a source tree
LIBRARIES = {"_native": "txl_cpu", "_cuda": "txl_cuda"}  # lib<name>, which exports <name>_library()


@dataclass
class NativeModule:
    """A compiled module txl_kernels.<name> and its file, or why it cannot be used; then module and
    file are None."""

    module: Any = None
    file: Path | None = None
    why_not_loaded: str | None = None


def load(name: str, language: str) -> NativeModule:
    """Return the module of this copy of the package. A source tree without one uses that of the
    installed package, if it was built from the same sources."""
    errors = []
    for folder in (PACKAGE, *_installed()):
        files = (folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        file = next((file for file in files if file.is_file()), None)
        note = folder / f"{name}_missing.txt"  # setup.py writes it if the build failed
        if file is None:
            if note.is_file():
                errors.append(note.read_text(encoding="utf-8").strip())
            continue
        try:
            module = _import(name, file)
        except ImportError as error:
            errors.append(f"the {language} module could not be loaded: {error}")
            continue
        if vars(module).get("FIELDS") == Call._fields and (
            not in_source_tree() or vars(module).get("SOURCE_HASH") == source_hash(SOURCES, name)
        ):
            connect(module)
            return NativeModule(module, file)
        errors.append(_left_behind(language, file))
    return NativeModule(why_not_loaded=errors[0] if errors else _nowhere(name, language))


def _import(name: str, file: Path) -> Any:
    """Return a module, connected to the library beside it.

    Raises:
        ImportError: one of both cannot be loaded, or they are of different sources.
    """
    # For a name that it knows pybind11 returns the same module again, even if the file is another.
    # A name is stored as UTF-8, which a path cannot always be.
    folder = str(file.parent).encode(errors="backslashreplace").decode()
    spec = importlib.util.spec_from_file_location(f"txl_kernels in {folder}.{name}", file)
    assert spec is not None  # the file has the suffix of an extension module
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = library_of(name, file)
    try:
        find = getattr(ctypes.CDLL(str(library)), f"{LIBRARIES[name]}_library")
    except (OSError, AttributeError) as error:
        raise ImportError(str(error)) from error
    find.restype = ctypes.c_void_p
    if not module.set_library(find()):
        raise ImportError(f"{library} was built from other sources than {file.name}")
    sys.modules[f"txl_kernels.{name}"] = module
    return module


def library_of(name: str, file: Path) -> Path:
    """Return the library of kernels beside the module `file`."""
    return file.with_name(f"lib{LIBRARIES[name]}{'.dylib' if sys.platform == 'darwin' else '.so'}")


def torch_library() -> ctypes.CDLL | None:
    """Return torch's own library, which is already loaded, or None. A symbol lookup in it follows
    its dependencies, so another package's copy of a library cannot be found by mistake."""
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError:
        return None


def address_of(name: str) -> int:
    """Return the address of a function in torch's library or its dependencies; 0 if there is
    none."""
    function = getattr(torch_library(), name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def connect(module: Any) -> None:
    """Set the addresses of the C functions by which the module reads torch's tensors.

    If a function is missing, or disagrees with Python about a tensor, the module uses Python's
    attributes instead.
    """
    module.set_torch_functions([address_of(name) for name in module.TORCH_FUNCTIONS])
    x = torch.frombuffer(bytearray(24), dtype=torch.float32)
    if module.tensor_metadata(x) != (tuple(x.shape), x.stride(), x.data_ptr()):
        module.set_torch_functions([0] * len(module.TORCH_FUNCTIONS))


def in_source_tree() -> bool:
    """Whether this copy of the package lies beside its C++ sources."""
    return (SOURCES / "attention.h").is_file()


def _installed() -> Iterator[Path]:
    """Yield, in a source tree, the folders of other, installed copies of the package."""
    for distribution in importlib.metadata.distributions(name="txl-kernels") if in_source_tree() else ():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")  # pip writes it
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(os.fsdecode(unquote_to_bytes(urlsplit(origin["url"]).path))) / "txl_kernels"
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


def _nowhere(name: str, language: str) -> str:
    versions = [re.search(r"\.cpython-3(\d+)(t?)-", file.name) for file in PACKAGE.glob(f"{name}.*")]
    if any(versions):
        others = ", ".join(_version(*x) for x in sorted((int(x[1]), x[2] == "t") for x in versions if x))
        own = _version(sys.version_info.minor, bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
        return (
            f"{PACKAGE} has a {language} module for CPython {others}; it has none for CPython {own} on "
            f"{sysconfig.get_platform()}: `pip install .` in a source tree builds it"
        )
    if in_source_tree():
        return (
            f"this is the source tree {PACKAGE.parent}, where the {language} module is not built, and no installed "
            "package has it: `pip install .` in this tree builds it"
        )
    return f"the {language} module is not in {PACKAGE}; install the package again"


def _version(minor: int, is_free_threaded: bool) -> str:
    return f"3.{minor}{' free-threaded' if is_free_threaded else ''}"
