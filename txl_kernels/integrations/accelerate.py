"""Swaps the classes of known attention modules, and back; and reports what was done, module by
module."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from txl_kernels.integrations.peer import STATE, Accelerated, Peer, has_kernel, new_state
from txl_kernels.integrations.registry import accelerated_class, find
from txl_kernels.integrations.streaming import forget

Weights = Literal["fallback", "none"]
Found = tuple[str, nn.Module, Sequence[nn.Module]]
HEADER = ("module", "class", "what was done", "fallbacks")


@dataclass(frozen=True)
class Row:
    """One attention module.

    Attributes:
        name: in the model.
        kind: full name of its class.
        reason: why it was left alone; None if it was accelerated.
    """

    name: str
    kind: str
    reason: str | None
    module: nn.Module = field(repr=False, compare=False)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls so far that the original answered, by reason."""
        return dict(self.module.fallbacks) if isinstance(self.module, Accelerated) else {}


@dataclass(frozen=True)
class Report:
    """Printed, a table: what was accelerated, what was not and why, and calls that fell back so
    far."""

    rows: tuple[Row, ...]

    @property
    def accelerated(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is None)

    @property
    def left_alone(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is not None)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls so far that an original answered, by reason, of all modules."""
        total: dict[str, int] = {}
        for row in self.rows:
            for reason, count in row.fallbacks.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def __str__(self) -> str:
        if not self.rows:
            return "nothing to accelerate: the model has no attention module that txl_kernels.integrations knows"
        lines = [HEADER]
        for row in self.rows:
            counts = "; ".join(f"{count} x {reason}" for reason, count in row.fallbacks.items())
            done = "accelerated" if row.reason is None else f"left alone: {row.reason}"
            lines.append((row.name or "(the model)", row.kind.rpartition(".")[2], done, counts or "-"))
        widths = [max(len(line[c]) for line in lines) for c in range(len(HEADER))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*table, f"{len(self.accelerated)} of {len(self.rows)} accelerated"])


def accelerate(
    model: nn.Module, strict: bool = False, weights: Weights = "fallback", streaming: bool = False
) -> Report:
    """Runs the relative-position attention of a model's known modules on these kernels, in place.

    The modules' classes change, nothing else: parameters, state_dict names, hooks and isinstance
    stay; copies, pickles and replicas are accelerated, too. Modules that are accelerated already
    take over `weights` and `streaming`. A query that sees no key gives 0, where some libraries give
    a mean over padding.

    Args:
        model: any module; its parts are searched.
        strict: raise where a known module must be left alone, and where there is none; nothing is
            changed then.
        weights: for calls that ask for attention weights, "fallback" runs the original and returns
            them, "none" returns None in their place (SpeechBrain asks at every call).
        streaming: without gradients, on a CPU, keep what a streaming step projected for the next
            one: W_kR R, and keys and values of NeMo's cache. For parameters that stay as they are:
            a change through `.data` is not noticed.

    Returns:
        A report, to print: each known module, whether it was accelerated or why not, and how often
        its original has answered since.

    Raises:
        TypeError, ValueError: an argument; with `strict`, every module that would be left alone.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(streaming, bool):
        raise TypeError(f"streaming must be True or False, got {type(streaming).__name__}")
    if weights not in ("fallback", "none"):
        raise ValueError(f"weights must be 'fallback' or 'none', got {weights!r}")
    rows, todo, accelerated = [], [], []
    for name, module, ancestors in _modules(model):
        if isinstance(module, Accelerated):
            accelerated.append(module)
            rows.append(Row(name, _path(module.original), None, module))
            continue
        kind = type(module)
        peer, reason = find(_path(kind)), None
        if peer is not None:
            reason = _hindrance(peer, module, ancestors)
        elif (base := _known_base(kind)) is not None:
            reason = f"a subclass of {base}, whose own code is unknown"
        else:
            continue
        if peer is not None and reason is None:
            todo.append((module, peer, ancestors))
        rows.append(Row(name, _path(kind), reason, module))
    report = Report(tuple(rows))
    if strict and (report.left_alone or not rows):
        raise ValueError(f"strict=True, and not every attention module can be accelerated:\n{report}")
    for module in accelerated:
        module.__dict__[STATE] |= {"weights": weights, "streaming": streaming}
    for module, peer, ancestors in todo:
        module.__dict__[STATE] = new_state(
            weights=weights, streaming=streaming, **peer.adapter.settings_from(ancestors)
        )
        module.__class__ = accelerated_class(peer, type(module))
    for row in report.left_alone:
        warnings.warn(f"txl_kernels left {row.name or 'the model'} ({row.kind}) alone: {row.reason}", stacklevel=2)
    if not rows:
        warnings.warn(f"txl_kernels: {report}", stacklevel=2)
    return report


def restore(model: nn.Module) -> int:
    """Gives modules their own classes back; how many.

    Raises:
        TypeError: model is no module.
        RuntimeError: a module's class was changed since (by a parametrization, say), by name;
            nothing is restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Accelerated)]
    for name, module in found:
        if type(module) is not accelerated_class(module.peer, module.original):
            raise RuntimeError(
                f"{name or 'the model'} is now a {_path(type(module))}: undo what changed its class since it was accelerated"
            )
    for _, module in found:
        forget(module)
        del module.__dict__[STATE]
        module.__class__ = module.original
    return len(found)


def _modules(model: nn.Module) -> Iterator[Found]:
    """Each once, with its name and the modules above it, outermost first."""
    seen: set[int] = set()

    def walk(
        name: str, module: nn.Module, above: tuple[nn.Module, ...]
    ) -> Iterator[tuple[str, nn.Module, Sequence[nn.Module]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module, above
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child, (*above, module))

    yield from walk("", model, ())


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_base(kind: type) -> str | None:
    return next((_path(base) for base in kind.__mro__[1:] if find(_path(base)) is not None), None)


def _hindrance(peer: Peer, module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    """Why a module is left alone, or None."""
    reason = peer.unknown_source(type(module))
    if reason is not None:
        return reason
    parameters = list(module.parameters())
    if not parameters:
        return "has no parameters yet"
    for x in parameters:
        if isinstance(x, nn.parameter.UninitializedParameter):
            return "has parameters that are not initialised"
        # What is on "meta" may be anywhere later; calls look again.
        if x.is_floating_point() and x.device.type != "meta" and not has_kernel(x.device, x.dtype):
            return f"no kernel for {x.dtype} on {x.device.type}"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule"
    try:
        return peer.refuses(module, ancestors)
    except AttributeError as error:
        return f"is not complete: {error}"
