"""What is known of one attention class of another library."""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from torch import nn

from txl_kernels.integrations.accelerated import Accelerated

Refuses = Callable[[nn.Module, Sequence[nn.Module]], str | None]


def _takes_all(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """An attention class, and the adapter that stands for it.

    Attributes:
        name: of the accelerated class, a Python identifier of its own.
        path: full name of the original class.
        adapter: subclass of `Accelerated` with the `forward` that calls the kernels.
        distribution: the package that holds the class, as pip knows it.
        hashes: by version of the distribution, `source_hash` of the class as tested; empty for any
            source.
        helpers: functions beside the class, in its module, whose source counts, too.
        refuses: why a module is to be left alone, or None; gets the modules above it, outermost
            first.
    """

    name: str
    path: str
    adapter: type[Accelerated]
    distribution: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    helpers: tuple[str, ...] = ()
    refuses: Refuses = _takes_all

    def original(self) -> Any:
        """The class, its package imported."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def unknown_source(self, original: type) -> str | None:
        """Why the class is not the one that was tested, or None."""
        if not self.hashes:
            return None
        try:
            found = source_hash(original, self.helpers)
        except (OSError, TypeError, AttributeError) as error:
            return f"its source cannot be read ({error}); tested: {self._tested()}"
        if found in self.hashes.values():
            return None
        return f"source unknown ({self.distribution} {self._version()}, hash {found}); tested: {self._tested()}"

    def _tested(self) -> str:
        return ", ".join(f"{self.distribution} {version}" for version in self.hashes)

    def _version(self) -> str:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "of unknown version"


def source_hash(original: type, helpers: Sequence[str] = ()) -> str:
    """Sixteen digits of the sha256 of a class' source, that of its bases outside torch, and helpers
    of its module.

    Raises:
        OSError, TypeError, AttributeError: there is no source, or no such helper.
    """
    module = sys.modules[original.__module__]
    classes = [c for c in original.__mro__ if c is not object and not c.__module__.startswith(("torch.", "abc"))]
    parts = [inspect.getsource(x) for x in (*classes, *(getattr(module, name) for name in helpers))]
    lines = [line.rstrip() for part in parts for line in part.splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
