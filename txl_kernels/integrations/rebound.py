"""Copies of functions that find other objects under some of their global names."""

import types
from collections.abc import Callable, Mapping
from typing import Any


def rebound(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function, with the decorators around it, whose code finds the values of
    `names` under these global names. The function itself, and its module, do not change.

    Decorators are those of functools.wraps, which hold what they wrap in a cell of their closure.
    The copy sees later changes of its module's globals no more.
    """
    code = function.__code__
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        # By the name of its module, torch.compile would look for the globals in the module.
        scope = {name: value for name, value in scope.items() if name != "__name__"} | dict(names)
    else:
        copied = rebound(inner, names)
        closure = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in closure or ())
    result = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    result.__module__ = function.__module__
    return result
