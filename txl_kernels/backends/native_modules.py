"""The compiled modules of this package, and why one is not there."""

import importlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl_kernels.backends.source_hash import source_hash
from txl_kernels.call import Call

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = PACKAGE.parent / "csrc"  # in a source tree


@dataclass
class NativeModule:
    """txl_kernels.<name>; `module` is None where it cannot be used, then `error` says why."""

    name: str
    language: str
    module: Any = None
    error: str = ""
    unbuilt: bool = False  # then another copy of the package may have it, which is looked up when asked

    def missing(self) -> str | None:
        """Why it is not there; None if it is."""
        if self.module is not None:
            return None
        note = PACKAGE / f"{self.name}_missing.txt"  # of setup.py
        if note.is_file():
            return note.read_text(encoding="utf-8").strip()
        return _why_not(self.name, self.language, self.error) if self.unbuilt else self.error


def load(name: str, language: str) -> NativeModule:
    """Imports a module, if it was built, belongs to this copy of the package, and takes the calls
    of this source."""
    try:
        module = importlib.import_module(f"txl_kernels.{name}")
    except ImportError as error:
        return NativeModule(name, language, error=str(error), unbuilt=True)
    file = Path(str(module.__file__)).resolve()
    if file.parent != PACKAGE:  # an editable install offers its own to every copy
        return NativeModule(name, language, error=f"{file} is of another copy of the package", unbuilt=True)
    if vars(module).get("FIELDS") != Call._fields or _left_behind(name, module):
        older = f"the {language} module {file} was built from another version of the source; install the package again"
        return NativeModule(name, language, error=older)
    return NativeModule(name, language, module)


def _left_behind(name: str, module: Any) -> bool:
    """Whether the sources beside the package, in a source tree, are no longer those of the
    module."""
    in_source_tree = (SOURCES / "problem.h").is_file()
    return in_source_tree and vars(module).get("SOURCE_HASH") != source_hash(SOURCES, name)


def _why_not(name: str, language: str, reason: str) -> str:
    elsewhere = _installed_with(name)
    if elsewhere is not None:
        return (
            f"this is the source tree {PACKAGE.parent}, where the {language} module is not built; the installed package, "
            f"{elsewhere}, has it. Start Python in another folder or with PYTHONSAFEPATH=1, or build it here: "
            "pip install -e ."
        )
    build = "; pip install -e . builds it here" if (PACKAGE.parent / "setup.py").is_file() else ""
    return f"the {language} module could not be loaded: {reason}{build}"


def _installed_with(name: str) -> Path | None:
    """Where another copy of this package, which Python found later, has the module."""
    for distribution in importlib.metadata.distributions(name="txl-kernels"):
        folder = Path(str(distribution.locate_file("txl_kernels"))).resolve()
        if folder != PACKAGE and any(folder.glob(f"{name}.*")):
            return folder
    return None
