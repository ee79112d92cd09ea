"""Replacement of the classes of known attention modules, and its reversal, with a report for each
module."""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from txl_kernels.checks import span
from txl_kernels.integrations.attention import Window
from txl_kernels.integrations.peer import STATE, Accelerated, Peer, has_kernel, new_state
from txl_kernels.integrations.registry import accelerated_class, find, find_copied_peer, path_of, similar_peers
from txl_kernels.integrations.select import Chosen, Selection
from txl_kernels.integrations.streaming import evict
from txl_kernels.integrations.trial import verdict
from txl_kernels.integrations.tried import Tried
from txl_kernels.integrations.wrapped import has_replaced_forward, replaced_method, set_class

Weights = Literal["fallback", "none"]
Export = Literal["original", "operator"]
Chain = Sequence[tuple[str, nn.Module]]
HEADER = ("module", "class", "what was done", "fallbacks")


@dataclass(frozen=True)
class Row:
    """A row of a report: one attention module.

    Attributes:
        name: the module's name in the model.
        kind: the full name of its class.
        reason: why it was not accelerated; None if it was.
        reference: a weak reference to the module.
        note: how it was recognised, if not by its class' name.
        concerns: False if there was nothing to accelerate: it has no relative positions, or was not
            selected.
    """

    name: str
    kind: str
    reason: str | None
    reference: "weakref.ref[nn.Module]" = field(repr=False, compare=False)
    note: str = ""
    concerns: bool = True

    @property
    def module(self) -> nn.Module | None:
        """The module, or None once the model has dropped it: a report keeps no module alive."""
        return self.reference()

    @property
    def fallbacks(self) -> dict[str, int]:
        """The number of calls so far that the original code answered, by reason."""
        module = self.module
        return dict(module.fallbacks) if isinstance(module, Accelerated) else {}

    @property
    def done(self) -> str:
        """The outcome, in words."""
        if self.reason is None:
            return f"accelerated{self.note}"
        return f"left alone: {self.reason}" if self.concerns else f"nothing to do: {self.reason}"


@dataclass(frozen=True)
class Report:
    """The result of `accelerate`, which prints as a table: which modules were accelerated, which
    were not and why, and how many calls fell back so far.

    Attributes:
        rows: one for each known module.
        unknown: if there is none, a line for each class of attention in the model: the first
            module and how many more there are.
    """

    rows: tuple[Row, ...]
    unknown: tuple[str, ...] = ()

    @property
    def accelerated(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is None)

    @property
    def left_alone(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reason is not None and row.concerns)

    @property
    def fallbacks(self) -> dict[str, int]:
        """The number of calls so far that original code answered, by reason, over all modules."""
        total: dict[str, int] = {}
        for row in self.rows:
            for reason, count in row.fallbacks.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def __str__(self) -> str:
        if not self.rows:
            first = "nothing to accelerate: the model has no attention module that txl_kernels.integrations knows"
            return "\n  ".join([first, *self.unknown])
        lines = [HEADER]
        for row in self.rows:
            counts = "; ".join(f"{count} x {reason}" for reason, count in row.fallbacks.items())
            lines.append((row.name or "(the model)", row.kind.rpartition(".")[2], row.done, counts or "-"))
        widths = [max(len(line[c]) for line in lines) for c in range(len(HEADER))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        total = len(self.accelerated) + len(self.left_alone)
        return "\n".join([*table, f"{len(self.accelerated)} of {total} accelerated"])


def accelerate(
    model: nn.Module, strict: bool = False, weights: Weights = "fallback", streaming: bool = False, *,
    include: Chosen = None, exclude: Chosen = None, window: Window = None, verify: bool | None = None,
    export: Export = "original",
) -> Report:  # fmt: skip
    """Run the relative-position attention of a model's known modules on these kernels, in place.

    Only the modules' classes change. Parameters, state_dict names, hooks and isinstance do not;
    copies, pickles and replicas are accelerated, too. A second call changes only the settings
    (`weights`, `streaming`, `window`, `export`) of the modules that it selects. A query that sees
    no key has output 0, where some libraries average over padding.

    A module is known by the name and source of its class, or by its source alone if the class is a
    copy in another package; see `explain`. A class of a known name whose source is unknown (another
    release) is compared with the adapter in a trial, on small random inputs, and taken if outputs
    and gradients agree; calls of other kinds than the trial's run the original code.

    Args:
        model: any module; its submodules are searched.
        strict: True to raise, before anything is changed, if a known module cannot be accelerated,
            or if there is none to accelerate. Attention without relative positions does not count.
        weights: for calls that ask for attention weights: "fallback" runs the original code and
            returns them, "none" returns None in their place (SpeechBrain asks in every call).
        streaming: True to keep projections from one streaming step to the next, without gradients
            on a CPU: W_kR R, and the keys and values of NeMo's cache. Parameters must not be
            changed through `.data`, because such a change is not noticed.
        include, exclude: None for all modules, or one or several classes, names of classes, or
            names of modules (* matches anything). Each entry also selects the modules inside those
            that it matches.
        window: None, or (left, right): the numbers of frames before and after its own that a query
            sees at most (None for all), in addition to the model's masks. A model trained with more
            context gives other results. Calls that the original code would have to answer raise
            RuntimeError.
        verify: None to try classes of known names whose source is unknown, where that source shows
            that a trial decides: it has no branch by dtype or device and compares lengths with
            nothing beyond the trial's. False to leave them alone. True to try also modules that
            resemble a known one (a changed copy), and to rely on the trial alone.
        export: the attention in a graph of torch.export, or of torch.onnx.export(.., dynamo=True)
            with the table of txl_kernels.onnx.translations(): "original" (with a warning) or
            "operator", the operator of these kernels, which must be installed where the graph
            runs; see the page on deployment. dynamo=False always writes the original.

    Returns:
        A report, which can be printed: each known module, whether it was accelerated or why not,
            and how often its original code has answered since.

    Raises:
        TypeError, ValueError: an argument is wrong (the message names it); with `strict`, a module
            cannot be accelerated (the message has the report).

    Example:
        >>> report = accelerate(model)  # of transformers, NeMo, ESPnet, ..: print it
        >>> len(report.accelerated), len(report.left_alone)
        (2, 0)
    """
    _check(model, streaming, weights, window, verify, export)
    included, excluded = Selection("include", include), Selection("exclude", exclude)
    settings: dict[str, Any] = {
        "weights": weights,
        "streaming": streaming,
        "window": window,
        "export": export,
        "warned": {},
    }
    rows: list[Row] = []
    new: list[tuple[nn.Module, Peer, Tried | None, list[nn.Module]]] = []
    accelerated: list[tuple[Any, list[nn.Module], bool]] = []
    for chain in _modules(model):
        name, module = chain[-1]
        ancestors = [m for _, m in chain[:-1]]
        is_excluded, is_included = excluded.has(chain), included.has(chain) or not included.given
        selected = is_included and not is_excluded
        row, peer, tried = None, None, None
        if isinstance(module, Accelerated):
            path = path_of(module.original)
            note = "" if path == module.peer.path else f", as {module.peer.path}"
            note += ", tried out" if module.setting("tried") else ""
            reason = "its forward was replaced on the instance" if has_replaced_forward(module) else None
            row = Row(name, path, reason, weakref.ref(module), note)
            accelerated.append((module, ancestors, selected))
        elif selected:
            row, peer, tried = classify(name, module, ancestors, verify)
        elif find(path_of(type(module))) is not None:
            reason = "excluded" if is_excluded else "not included"
            row = Row(name, path_of(type(module)), reason, weakref.ref(module), concerns=False)
        rows += [] if row is None else [row]
        new += [] if peer is None else [(module, peer, tried, ancestors)]
    for selection in (included, excluded):
        selection.check_all_used()
    report = Report(tuple(rows), () if rows else tuple(_attention_classes(model)))
    if strict and (report.left_alone or not report.accelerated):
        raise ValueError(f"strict=True, and not every attention module can be accelerated:\n{report}")
    if window is not None:
        chosen = [peer for _, peer, *_ in new] + [module.peer for module, _, selected in accelerated if selected]
        for peer in chosen:
            if not peer.applies_window:
                raise ValueError(
                    f"window must be None for {peer.path}, got {window}: its adapter would ignore it, unless it is "
                    "registered with Peer(.., applies_window=True)"
                )
    for module, peer, tried, ancestors in new:
        module.__dict__[STATE] = new_state(tried=tried)
        set_class(module, accelerated_class(peer, type(module)))
        accelerated.append((module, ancestors, True))
    for known, ancestors, selected in accelerated:
        known.__dict__[STATE] |= (settings if selected else {}) | known.settings_from(ancestors)
    alike: dict[Any, list[str]] = {}
    for row in report.left_alone:
        alike.setdefault((row.kind, row.reason), []).append(row.name or "the model")
    for (kind, why), (first, *more) in alike.items():
        others = f" and {len(more)} more" if more else ""
        warnings.warn(f"txl_kernels left {first}{others} ({kind}) alone: {why}", stacklevel=2)
    if not rows:
        warnings.warn(f"txl_kernels: {str(report).splitlines()[0]}", stacklevel=2)
    return report


def _check(model: Any, streaming: Any, weights: Any, window: Any, verify: Any, export: Any) -> None:
    check_module("model", model)
    if not isinstance(streaming, bool):
        raise TypeError(f"streaming must be True or False, got {type(streaming).__name__}")
    if verify is not None and not isinstance(verify, bool):
        raise TypeError(f"verify must be None, True or False, got {type(verify).__name__}")
    if weights not in ("fallback", "none"):
        raise ValueError(f"weights must be 'fallback' or 'none', got {weights!r}")
    if export not in ("original", "operator"):
        raise ValueError(f"export must be 'original' or 'operator', got {export!r}")
    if window is not None:
        if not isinstance(window, (tuple, list)):
            raise TypeError(f"window must be None or a pair (left, right), got {window!r}")
        span(False, window)


def check_module(argument: str, module: Any) -> None:
    """Check that an argument is a module.

    Raises:
        TypeError: it is not; the message names the argument.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument} must be a torch.nn.Module, got {type(module).__name__}")


def classify(
    name: str, module: nn.Module, ancestors: Sequence[nn.Module], verify: bool | None = None
) -> tuple[Row | None, Peer | None, Tried | None]:
    """Return the decision about a module that is not accelerated: its row of a report (None for an
    unknown module), the peer whose adapter it gets (or None), and the calls that a trial compared,
    if there was one.

    ancestors: the modules that contain it, outermost first.
    """
    path = path_of(type(module))
    found = recognise(module)
    if found is None:
        return None, None, None
    peer, unknown, note = found
    tried = None
    try:
        nothing = peer.why_nothing_to_do(module, ancestors)
    except AttributeError as error:
        nothing, unknown = None, unknown or f"is not complete: {error}"
    if nothing is not None:
        return Row(name, path, nothing, weakref.ref(module), concerns=False), None, None
    if unknown is not None and (verify or (verify is None and peer.path == path)):
        result = _equal_peer(module, peer, ancestors, bool(verify))
        if isinstance(result, str):
            unknown = f"{unknown}; {result}" + ("" if verify else "; verify=True relies on the trial alone")
        else:
            (peer, tried), unknown = result, None
            note = f", tried out as {peer.name} in {tried.seconds:.2g} s"
    elif unknown is not None:
        unknown += f"; verify={'None' if peer.path == path else 'True'} tries it out"
    reason = unknown or _why_not_accelerated(peer, module, ancestors)
    return Row(name, path, reason, weakref.ref(module), note), None if reason else peer, None if reason else tried


def recognise(module: nn.Module) -> tuple[Peer, str | None, str] | None:
    """Return the peer whose class a module has or resembles; why that is not certain, or None; and
    how it was recognised, if not by its class' name. Return None for a module that resembles no
    peer."""
    kind = type(module)
    named = find(path_of(kind))
    reason = None if named is None else named.unknown_source(kind)
    if named is not None and reason is None:
        return named, None, ""
    copied = find_copied_peer(module)
    if copied is not None:
        return copied, None, f", a copy of {copied.path}"
    if named is not None:
        return named, reason, ""
    alike = next(similar_peers(module), None)
    base = next((x for x in map(find, map(path_of, kind.__mro__[1:])) if x is not None), None)
    if base is not None:
        return alike or base, f"a subclass of {base.path}, whose own code is unknown", ""
    return None if alike is None else (alike, f"like {alike.path}, but with code of its own", "")


def _equal_peer(
    module: nn.Module, first: Peer, ancestors: Sequence[nn.Module], asked: bool
) -> tuple[Peer, Tried] | str:
    """Return the first peer whose adapter computes the same as the module, with the calls that its
    trial compared; or, if there is none, how each differs. The candidates are `first` and, if
    asked, the peers that the module resembles."""
    differences: dict[type[Accelerated], str] = {}
    for peer in (first, *(similar_peers(module) if asked else ())):
        if peer.adapter not in differences:
            reason = _why_not_accelerated(peer, module, ancestors)
            found = reason or verdict(module, peer, ancestors, asked)
            if isinstance(found, Tried):
                return peer, found
            differences[peer.adapter] = found
    return "; ".join(differences.values())


def is_accelerated(model: nn.Module) -> bool:
    """Whether any module of a model, or the model itself, is accelerated.

    Raises:
        TypeError: model is not a module.
    """
    check_module("model", model)
    return any(isinstance(module, Accelerated) for module in model.modules())


def restore(model: nn.Module) -> int:
    """Give accelerated modules their original classes back, and return their number.

    Raises:
        TypeError: model is not a module.
        RuntimeError: since a module was accelerated, its class was changed (by a parametrization,
            for example), or its forward was replaced on the instance by something other than
            accelerate's hooks. The message names it, and nothing is restored.
    """
    check_module("model", model)
    found: list[tuple[str, Any]] = [item for item in model.named_modules() if isinstance(item[1], Accelerated)]
    for name, module in found:
        label = name or "the model"
        if has_replaced_forward(module):
            raise RuntimeError(
                f"{label} has a forward of the instance's, replaced since it was accelerated: undo that first"
            )
        if "original" not in vars(type(module)):  # a class derived from the accelerated one
            raise RuntimeError(
                f"{label} is now a {path_of(type(module))}: undo what changed its class since it was accelerated"
            )
    for _, module in found:
        evict(module)
        module.on_restore()
        set_class(module, module.original)
        del module.__dict__[STATE]
    return len(found)


def _modules(model: nn.Module) -> Iterator[Chain]:
    """Yield each module once, at the end of the chain of (name, module) that contain it, outermost
    first."""
    seen: set[int] = set()

    def walk(chain: tuple[tuple[str, nn.Module], ...]) -> Iterator[Chain]:
        name, module = chain[-1]
        if id(module) in seen:
            return
        seen.add(id(module))
        yield chain
        for child_name, child in module.named_children():
            yield from walk((*chain, (f"{name}.{child_name}" if name else child_name, child)))

    yield from walk((("", model),))


def _attention_classes(model: nn.Module) -> Iterator[str]:
    """Yield a line for each class of attention (by its name): the first module, and how many more
    there are."""
    found: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        if any(word in type(module).__name__.lower() for word in ("attention", "attn", "mha")):
            found.setdefault(type(module), []).append(name or "(the model)")
    for kind, (first, *others) in found.items():
        yield f"{first}{f' and {len(others)} more' if others else ''} ({path_of(kind)})"


def _why_not_accelerated(peer: Peer, module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    """Return the reason why a module is not accelerated, or None."""
    for x in module.parameters():
        if isinstance(x, nn.parameter.UninitializedParameter):
            return "has parameters that are not initialised"
        # Tensors on "meta" may be loaded to any device later, and tensors of one-byte elements are
        # those of quantized layers: each call checks its own tensors.
        elsewhere = x.device.type == "meta" or x.itemsize == 1
        if x.is_floating_point() and not elsewhere and not has_kernel(x.device, x.dtype):
            return f"no kernel for {x.dtype} on {x.device.type}"
    replaced = replaced_method(module)
    if replaced is not None:
        return f"its {replaced} was replaced on the instance"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule"
    try:
        return peer.why_not_module(module, ancestors)
    except AttributeError as error:
        return f"is not complete: {error}"
