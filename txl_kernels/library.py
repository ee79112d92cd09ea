"""The definition of the package's operators in torch, once in a process."""

from collections.abc import Callable, Collection

import torch
from torch.library import Library


def define(
    *schemas: str, implement: Callable[[Library], object], tags: Collection[torch.Tag] = (), of: type[Library] = Library
) -> None:
    """Define operators, and call `implement` with their library.

    A package that was removed from sys.modules and is imported again uses the operators that it
    defined before: models and compiled graphs of that time refer to them.

    Args:
        schemas: those of the operators, without the namespace.
        implement: adds the implementations.
        tags: those of the operators.
        of: the class of the library.

    Raises:
        ImportError: operators of these names were defined before, with other schemas.
    """
    defined = vars(torch.ops.txl_kernels).setdefault("_defined", {})
    names = tuple(schema.partition("(")[0] for schema in schemas)
    if names in defined:
        if defined[names][0] != schemas:
            raise ImportError(
                f"txl_kernels was imported before in this process, in another version, whose torch operators "
                f"({', '.join(names)}) cannot be replaced: start a new process"
            )
        return
    library = _make(of)
    for schema in schemas:
        library.define(schema, tags=tags)
    implement(library)
    defined[names] = schemas, library  # while it lives, the operators do


def _make(kind: type[Library]) -> Library:
    return kind("txl_kernels", "FRAGMENT")


# torch stores the name of the file that makes a library (torch 2.6: of its caller) as UTF-8, which
# a path cannot always be.
for _function in (define, _make):
    _function.__code__ = _function.__code__.replace(co_filename="txl_kernels/library.py")
