"""What is known of one attention class of another library, and what all accelerated modules share:
when the original runs instead, and how that is counted."""

import hashlib
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from txl_kernels.backends import KERNELS

STATE = "_txl_kernels"  # of a module, an attribute beside its own


class Accelerated:
    """Base of adapters, left of the original class.

    Attributes:
        original: the class that the module had.
    """

    original: ClassVar[type]
    peer: ClassVar[Any]

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """What calls need to know of the modules above, outermost first; see `setting`."""
        return {}

    @property
    def fallbacks(self) -> "Counter[str]":
        """How often the original ran, by reason."""
        counts: Counter[str] = self.__dict__[STATE]["fallbacks"]
        return counts

    def fall_back(self, why: str, *args: Any, **kwargs: Any) -> Any:
        """The original's result, counted."""
        self.count(why)
        return self.original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    def count(self, why: str) -> None:
        """One more call that the original answers; none is counted while compiling."""
        if not torch.compiler.is_compiling():
            self.fallbacks[why] += 1

    def reader_of_weights(self: Any) -> str | None:
        """Of a class that stores its weights: who may read them after a call, or None."""
        return "a forward hook, which may read the weights that the original stores" if self._forward_hooks else None

    def setting(self, name: str) -> Any:
        """What `accelerate` was told, or found above the module."""
        return self.__dict__[STATE].get(name)

    def hindrance(self, x: Tensor, dropout_p: float = 0.0) -> str | None:
        """Why no kernel takes tensors like x and this dropout now, or None."""
        if dropout_p >= 1:
            return "everything is dropped"
        if torch._C._get_tracing_state() is not None or torch.onnx.is_in_onnx_export():
            return "traced or exported to ONNX"
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        return None if has_kernel(x.device, dtype) else f"no kernel for {dtype} on {x.device.type}"


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel takes tensors of such a device and dtype, of some head width."""
    return any(kernels.cannot_run(device, dtype) is None for name, kernels in KERNELS.items() if name != "cuda")


def new_state(**settings: Any) -> dict[str, Any]:
    """State of a module that is about to be accelerated."""
    return {"fallbacks": Counter(), **settings}


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
        refuses: why a module is to be left alone, or None; gets the modules above it, outermost
            first.
    """

    name: str
    path: str
    adapter: type[Accelerated]
    distribution: str
    hashes: Mapping[str, str] = field(default_factory=dict)
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
            found = source_hash(original)
        except (OSError, TypeError) as error:
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


def source_hash(original: type) -> str:
    """Sixteen digits of the sha256 of a class' source, of that of its bases outside torch, and of
    the functions and classes beside them that their methods name.

    Raises:
        OSError, TypeError: there is no source.
    """
    found: dict[str, Any] = {}
    for kind in original.__mro__:
        if kind.__module__.partition(".")[0] not in _NOT_OF_PEERS:
            _collect(kind, found)
    lines = [line.rstrip() for part in found.values() for line in inspect.getsource(part).splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


_NOT_OF_PEERS = ("torch", "abc", "builtins", "typing")


def _collect(part: Any, found: dict[str, Any]) -> None:
    """A class or function, and what it names of its own module, in the order met."""
    name = f"{part.__module__}.{part.__qualname__}"
    if name in found:
        return
    found[name] = part
    beside = vars(sys.modules[part.__module__])
    for used in _names(part):
        other = beside.get(used)
        if (inspect.isfunction(other) or inspect.isclass(other)) and other.__module__ == part.__module__:
            _collect(other, found)


def _names(part: Any) -> list[str]:
    """Global names in the code of a function, or of a class' methods."""
    members = vars(part).values() if inspect.isclass(part) else [part]
    plain = [getattr(x, "__func__", getattr(x, "fget", x)) for x in members]
    todo = [inspect.unwrap(x).__code__ for x in plain if inspect.isfunction(x)]
    names: dict[str, None] = {}
    while todo:
        code = todo.pop(0)
        names |= dict.fromkeys(code.co_names)
        todo += [x for x in code.co_consts if inspect.iscode(x)]
    return list(names)
