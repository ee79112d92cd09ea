"""The calls that a trial has compared, for a module whose class is taken after one: later calls of
other kinds are answered by the original."""

import inspect
from typing import Any

import torch
from torch import Tensor


def parameters_of(original: type, method: str) -> list[inspect.Parameter]:
    """Return the parameters of a class' method, without self; a base's, if the class' own passes on
    all (`*args`)."""
    methods = [vars(kind)[method] for kind in original.__mro__ if method in vars(kind)]
    signatures = [list(inspect.signature(x).parameters.values())[1:] for x in methods]
    named = [s for s in signatures if not any(x.kind is x.VAR_POSITIONAL for x in s)]
    return (named or signatures)[0]


class Tried:
    """The kinds of calls of a class that a trial has compared.

    A tensor's kind is whether it is bool, integer or real, its number of axes, and whether it is
    the call's first tensor or has its shape; an object's is its class, a flag's or a string's its
    value.

    Attributes:
        training, gradients: whether training mode, and gradients, were compared.
        seconds: the duration of the trial.
    """

    def __init__(self, original: type, method: str) -> None:
        """original: the class. method: the name of its method whose calls are meant."""
        parameters = parameters_of(original, method)
        self._names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
        self._defaults = {x.name: x.default for x in parameters}
        self._kinds: set[tuple[str, Any]] = set()
        self._implementations: set[str | None] = set()
        self.training = False
        self.gradients = True
        self.seconds = 0.0

    def record(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add a call that was compared."""
        self._kinds |= set(self._of(args, kwargs))
        self._implementations.add(_implementation(module))

    def why_not(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the reason why the original must answer a call, or None."""
        if module.training and not self.training:
            return "training mode, which its trial did not compare"
        if not self.gradients and torch.is_grad_enabled():
            return "gradients, which its trial did not compare"
        if _implementation(module) not in self._implementations:
            return "another attention implementation than in its trial"
        for found in self._of(args, kwargs):
            if found not in self._kinds:
                return f"an argument that its trial did not have, or had in another form: {found[0]}"
        return None

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the name and kind of each argument that is not its default."""
        names = [*self._names, *["*args"] * (len(args) - len(self._names))]
        given = [*zip(names, args, strict=False), *kwargs.items()]
        first = next((x for _, x in given if isinstance(x, Tensor)), None)
        return [
            (name, _kind(value, first))
            for name, value in given
            if value is not self._defaults.get(name) and (value is not False or name in self._defaults)
        ]


def _implementation(module: Any) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _kind(value: Any, first: Tensor | None) -> Any:
    if isinstance(value, Tensor):
        real = value.is_floating_point()
        same = "itself" if value is first else real and first is not None and value.shape == first.shape
        return ("real" if real else "bool" if value.dtype == torch.bool else "integer"), value.dim(), same
    if isinstance(value, (bool, str)):
        return value
    return type(value).__qualname__
