"""The modules of a model that a user selects: by class, by the class' name, or by the module's
name."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

Chosen = type | str | Iterable[type | str] | None


class Selection:
    """The entries of an `include` or `exclude` argument of `accelerate`.

    An entry is a class, the name of one (bare or full), or the name of a module, in which * matches
    anything. It selects the modules that it matches and all modules inside them.

    Raises:
        TypeError: an entry is neither a class nor a string; the message names `argument`.
    """

    def __init__(self, argument: str, chosen: Chosen) -> None:
        self.argument = argument
        entries: Any = () if chosen is None else [chosen] if isinstance(chosen, (str, type)) else chosen
        if not isinstance(entries, Iterable):
            raise TypeError(f"{argument} must be None, a class, a name or several of them, got {chosen!r}")
        self.entries = tuple(entries)
        for entry in self.entries:
            if not isinstance(entry, (str, type)):
                raise TypeError(f"{argument} must hold classes and names, got {entry!r}")
        self._unused = dict.fromkeys(self.entries)
        self.given = chosen is not None

    def has(self, chain: Sequence[tuple[str, nn.Module]]) -> bool:
        """Whether an entry matches a module or one that contains it. chain: names and modules,
        outermost first."""
        fitting = [entry for entry in self.entries if any(_fits(entry, name, module) for name, module in chain)]
        for entry in fitting:
            self._unused.pop(entry, None)
        return bool(fitting)

    def check_all_used(self) -> None:
        """Check that every entry matched a module. To be called after `has` was called for all
        modules.

        Raises:
            ValueError: an entry matches no module of the model.
        """
        if self._unused:
            (first, *_) = self._unused
            name = first if isinstance(first, str) else first.__qualname__
            raise ValueError(f"{self.argument} must hold classes and names of the model's modules, got {name!r}, "
                             "which fits none")  # fmt: skip


def _fits(entry: type | str, name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kinds = type(module).__mro__
    return fnmatch.fnmatchcase(name, entry) or any(
        entry in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in kinds
    )
