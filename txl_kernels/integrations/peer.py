"""Attention classes of other libraries (`Peer`), and the base class of all accelerated modules,
which decides when the original code runs instead and counts these calls."""

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from txl_kernels.backends import KERNELS
from txl_kernels.checks import autocast_dtype
from txl_kernels.integrations.source import ReplacedCode, source_hash
from txl_kernels.integrations.wrapped import why_not_skipped
from txl_kernels.linear import has_global_hook
from txl_kernels.torch_state import exporting, exporting_to_onnx

STATE = "_txl_kernels"  # the name of an attribute that is added to accelerated modules
EXPORTED = "exported or traced"


class Accelerated:
    """The base class of adapters. An accelerated class has it before the original class in its
    bases.

    An adapter's method has the original's parameters. It returns the original's output, or a str,
    the reason why the original must answer: then `fall_back` is called with the same arguments.

    Attributes:
        original: the class that the module had.
        peer: the `Peer` that the class belongs to.
        method: the name of the original's method that the adapter replaces.
        needs: names of attributes that a module of this kind has.
        skips: names of submodules that the original calls and the adapter does not. Each must be
            exactly of a known class, with the class' own forward and without hooks, else the
            original runs.
        reads: names of arguments that the adapter's method takes from its **kwargs, or that do not
            change the result. If the original's method has others that the adapter's has not, a
            call that gives them another value than their default runs the original.
        forwards: the known classes of such submodules, with their forwards: some of torch's, and
            those in the original's module that its code names.
        replaced: the original's method that the adapter's replaces. If the class has another now,
            the original runs.
        arguments: the names of this method's parameters, but for self.
        beside: the module that defines this method, for the functions that it calls.
        omitted: names of submodules that a trial's copy of a module leaves out.
        trial_settings: settings of a trial's copy, beside those of `settings_from`.
    """

    original: ClassVar[type]
    peer: ClassVar[Any]
    method: ClassVar[str] = "forward"
    needs: ClassVar[tuple[str, ...]] = ()
    skips: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()
    forwards: ClassVar[Mapping[type, Any]] = {}
    replaced: ClassVar[Any] = None
    arguments: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[Any] = None
    omitted: ClassVar[tuple[str, ...]] = ()
    trial_settings: ClassVar[Mapping[str, Any]] = {}

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Return the settings that calls need from the modules that contain this one, outermost
        first; see `setting`.

        `accelerate` calls it each time, after the classes have changed. Settings that are not
        returned keep their values.
        """
        return {}

    def on_restore(self) -> None:
        """Clean up; called before `restore` gives the class back."""

    @staticmethod
    def sample_length(module: Any, least: int) -> int:
        """Return a number of frames, at least `least`, that `sample` can have."""
        return least

    @staticmethod
    def mask_forms(module: Any) -> tuple[str, ...]:
        """Return the forms of masks that callers of the module pass: "bool", "integer", "real" (of
        0 and 1) and "additive"."""
        return ("bool",)

    @staticmethod
    def sample(module: Any, inputs: "RandomInputs", seen: Tensor | None) -> "Sample | None":
        """Return random frames, and a function that calls a module with them as its callers do and
        returns its result, for a trial; None if the adapter defines none.

        The first part of the result is [B, T, ..]. A result of the original that the adapter gives
        in another form is converted by the function.

        seen: None for all keys, or bool [B, T, T], the keys that each query sees.
        """
        return None

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise RuntimeError: torch.jit.script calls this method of every module in a model."""
        raise RuntimeError(
            "torch.jit.script does not take an accelerated model, whose code is not TorchScript: call restore(model) first, "
            "or torch.jit.trace, which writes down the original's attention"
        )

    @property
    @torch.jit.unused
    def fallbacks(self) -> "Counter[str]":
        """The number of calls that the original code answered, by reason."""
        counts: Counter[str] = self.__dict__[STATE]["fallbacks"]
        return counts

    def fall_back(self, why: str, *args: Any, **kwargs: Any) -> Any:
        """Count a call that the original code answers, except under torch.compile, and return its
        result.

        why: the reason, for the count.

        Raises:
            RuntimeError: `accelerate` was given a window, which the original code would ignore.
        """
        self.check_fallback(why)
        self.count_fallback(why)
        return getattr(self.original, self.method)(self, *args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the original's method by name."""
        return dict(zip(self.arguments, args, strict=False)) | kwargs

    def check_fallback(self, why: str) -> None:
        """Check that the original code may answer a call, as `fall_back` describes."""
        window = self.setting("window")
        if window is not None:
            raise RuntimeError(
                f"accelerate(model, window={window}) holds for the kernels alone, and here the original must answer "
                f"({why}): accelerate(model) without a window lets it"
            )

    def count_fallback(self, why: str) -> None:
        """Count a call that the original code answers, or that is computed as it does."""
        if why == EXPORTED and not torch.compiler.is_dynamo_compiling():
            warned = self.__dict__[STATE].get("warned", {})
            if not warned.get("export"):
                warned["export"] = True
                warnings.warn(
                    "an accelerated model is exported: its original attention is written down, not txl_kernels' "
                    "(accelerate(model, export='operator') exports the operator)",
                    stacklevel=2,
                )
        elif exporting_to_onnx():
            warnings.warn(
                f"the original's attention is exported, not the operator of accelerate(model, export='operator'): {why}",
                stacklevel=2,
            )
        if not torch.compiler.is_compiling():
            self.fallbacks[why] += 1

    def why_weights_needed(self: Any) -> str | None:
        """Return the reason why a class that stores its attention weights must compute them: a hook
        may read them after the call. None if there is no such hook."""
        return "a forward hook, which may read the weights that the original stores" if has_user_hooks(self) else None

    def setting(self, name: str) -> Any:
        """Return a setting that was given to `accelerate` or found by `settings_from`; None if
        there is none."""
        return self.__dict__[STATE].get(name)

    def why_not_kernel(self: Any, x: Tensor, dropout_p: float = 0.0) -> str | None:
        """Return the reason why no kernel supports tensors like x and this dropout now, or None."""
        if torch._C._get_tracing_state() is not None:
            return EXPORTED
        if exporting() and self.setting("export") != "operator":
            return EXPORTED
        if dropout_p >= 1:
            return "everything is dropped"
        if dropout_p != dropout_p:
            return "a dropout of another kind than torch's"
        if getattr(self.original, self.method) is not type(self).replaced:
            return f"another {self.method} of its class"
        for name in self.skips:
            why = why_not_skipped(self.get_submodule(name), self.forwards)
            if why is not None:
                return f"{why} on its {name}, which the kernels do not call"
        dtype = autocast_dtype(x.device.type) or x.dtype
        return None if has_kernel(x.device, dtype) else f"no kernel for {dtype} on {x.device.type}"


def has_user_hooks(module: nn.Module, before: bool = False) -> bool:
    """Whether forward hooks of a user's act on a module: not torch's own (FSDP's, for example), nor
    transformers' collector of outputs.

    before: True to count hooks before the call, too.
    """
    hooks = [*module._forward_hooks.values(), *(module._forward_pre_hooks.values() if before else ())]
    found = any(not str(getattr(hook, "__module__", "")).startswith(("torch.", "transformers.")) for hook in hooks)
    return found or (not torch.compiler.is_compiling() and has_global_hook())


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel supports tensors of this device and dtype, for some head width."""
    return any(kernels.why_not_tensors(device, dtype) is None for name, kernels in KERNELS.items() if name != "cuda")


def width_of(projection: nn.Module) -> int:
    """Return the number of input features of a linear layer, which may be wrapped.

    Raises:
        AttributeError: there is no linear layer in it.
    """
    for part in projection.modules():
        width: Any = getattr(part, "in_features", None)
        if width is not None:
            return int(width)
    raise AttributeError(f"{type(projection).__name__} does not say how many features it takes")


def new_state(**settings: Any) -> dict[str, Any]:
    """Return the initial state of a module that is about to be accelerated."""
    return {"fallbacks": Counter(), **settings}


Sample = tuple[Tensor, Callable[[Any, Tensor], Any]]


class RandomInputs:
    """Small random float32 tensors on the CPU, the same at every run, for B sequences of T frames,
    whose masks have a form of `mask_forms`.

    gradients: whether tensors require gradients.

    Attributes:
        made: the tensors, but for frames.
    """

    def __init__(self, T: int, form: str = "bool", B: int = 2, gradients: bool = False) -> None:
        self.T = T
        self.B = B
        self.form = form
        self.made: list[Tensor] = []
        self._gradients = gradients
        self._generator = torch.Generator("cpu").manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        self.made.append(self._normal(*shape).requires_grad_(self._gradients))
        return self.made[-1]

    def frames(self, width: int) -> Tensor:
        """Return frames [B, T, width]."""
        return self._normal(self.B, self.T, width)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def mask(self, seen: Tensor | None) -> Tensor | None:
        """Return the mask [B, 1, T or 1, T] of transformers' attention interface, or None."""
        if seen is None:
            return None
        seen = self.narrow(seen).unsqueeze(1)
        return additive(seen) if self.form == "additive" else seen

    def narrow(self, seen: Tensor) -> Tensor:
        """Return the keys that queries see, [B, 1, T] if all see the same, as callers pass them."""
        return seen[:, :1] if seen.stride(1) == 0 else seen

    def padding(self, seen: Tensor | None) -> Tensor:
        """Return a padding mask [B, T], True for the keys that no query sees."""
        return torch.zeros(self.B, self.T, dtype=torch.bool, device="cpu") if seen is None else ~seen.any(1)

    def table(self, width: int, past: int | None = None, future: int | None = None) -> Tensor:
        """Return encodings [1, past + 1 + future, width], farthest past first, of random values;
        past and future are T - 1 if None."""
        before, after = (self.T - 1 if n is None else n for n in (past, future))
        return self.normal(1, before + 1 + after, width)


def additive(seen: Tensor) -> Tensor:
    """Return a mask that hides keys when it is added to scores. seen: bool, True where visible."""
    return torch.zeros(seen.shape, device="cpu").masked_fill(~seen, torch.finfo(torch.float32).min)


Check = Callable[[nn.Module, Sequence[nn.Module]], str | None]


def _no_reason(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """An attention class of another library, and its adapter.

    Attributes:
        name: the name of the accelerated class, a unique Python identifier.
        path: the full name of the original class.
        adapter: a subclass of `Accelerated` whose `forward` calls the kernels; `Accelerated` itself
            for a class that `why_not_module` always refuses.
        distribution: the package that contains the class, by its name in pip.
        hashes: the `source_hash` of each tested source, by version of the distribution (or by the
            name of another that has a copy); empty to accept any source.
        why_not_module: returns the reason why a module cannot be accelerated, or None, from the
            module and the modules that contain it, outermost first.
        why_nothing_to_do: like `why_not_module`, but returns the reason why there is nothing to
            accelerate (no relative positions, for example), which gives no warning and no error
            under `strict`.
        applies_window: True if the adapter limits the context to `self.setting("window")`; else
            `accelerate` refuses a window for the module.
    """

    name: str
    path: str
    adapter: type[Accelerated]
    distribution: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    why_not_module: Check = _no_reason
    why_nothing_to_do: Check = _no_reason
    applies_window: bool = False

    def original(self) -> Any:
        """Import the package and return the original class."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def unknown_source(self, original: type) -> str | None:
        """Return the reason why a class is not one that was tested, or None."""
        if not self.hashes:
            return None
        try:
            found = source_hash(original)
        except ReplacedCode as error:
            return str(error)
        except (OSError, TypeError) as error:
            return f"its source cannot be read ({error}); tested: {self.tested()}"
        if found in self.hashes.values():
            return None
        return f"source unknown ({self.distribution} {self.version()}, hash {found}); tested: {self.tested()}"

    def tested(self) -> str:
        return ", ".join(v if " " in v else f"{self.distribution} {v}" for v in self.hashes)

    def version(self) -> str:
        """Return the installed version of the distribution."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "of unknown version"
