"""One attention class of another library (`Peer`), and the base of all accelerated modules:
when the original runs instead, and how that is counted."""

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
from txl_kernels.integrations.source import source_hash
from txl_kernels.integrations.wrapped import acts_on_calls

STATE = "_txl_kernels"  # of a module, an attribute beside its own
EXPORTED = "exported or traced"


class Accelerated:
    """Base of adapters, left of the original class.

    Attributes:
        original: the class that the module had.
        method: of the original, that the adapter replaces.
        needs: attributes by which a module is taken for one of the adapter's kind.
        skips: modules in it, by name, that the original calls and the adapter does not; where
            something acts on their calls, hooks say, the original runs.
    """

    original: ClassVar[type]
    peer: ClassVar[Any]
    method: ClassVar[str] = "forward"
    needs: ClassVar[tuple[str, ...]] = ()
    skips: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def settings_from(ancestors: Sequence[nn.Module]) -> dict[str, Any]:
        """Settings that calls need from the modules above, outermost first; see `setting`. Asked at
        every `accelerate`, when the classes have changed; what it leaves out stays as it was."""
        return {}

    def released(self) -> None:
        """Called before `restore` gives the class back."""

    @staticmethod
    def reach(module: Any) -> int:
        """For `sample`: how many frames it takes to see all that the module does."""
        return 13

    @staticmethod
    def sample(module: Any, draw: "Draw", seen: Tensor | None) -> "Sample | None":
        """For `accelerate`'s verify: frames, and how a module is called with them for its output;
        None if nobody has said how.

        seen: None for all, or bool [B, T, T], the keys that queries see.
        """
        return None

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked by torch.jit.script, of every module in a model."""
        raise RuntimeError(
            "torch.jit.script does not take an accelerated model, whose code is not TorchScript: call restore(model) first, "
            "or torch.jit.trace, which writes down the original's attention"
        )

    @property
    def fallbacks(self) -> "Counter[str]":
        """The number of calls that the original answered, by reason."""
        counts: Counter[str] = self.__dict__[STATE]["fallbacks"]
        return counts

    def fall_back(self, why: str, *args: Any, **kwargs: Any) -> Any:
        """The original's result, counted.

        Raises:
            RuntimeError: the context is limited by `accelerate`'s window, of which the original
                knows nothing.
        """
        self.count(why)
        return getattr(self.original, self.method)(self, *args, **kwargs)

    def count(self, why: str) -> None:
        """One more call that the original answers; none is counted while compiling.

        Raises:
            RuntimeError: as `fall_back`.
        """
        window = self.setting("window")
        if window is not None:
            raise RuntimeError(
                f"accelerate(model, window={window}) holds for the kernels alone, and here the original must answer "
                f"({why}): accelerate(model) without a window lets it"
            )
        if why == EXPORTED and not torch.compiler.is_dynamo_compiling():
            told = self.__dict__[STATE].get("told", {})
            if not told.get("export"):
                told["export"] = True
                warnings.warn(
                    "an accelerated model is exported: its original attention is written down, not txl_kernels' "
                    "(accelerate(model, export='operator') exports the operator)",
                    stacklevel=2,
                )
        if not torch.compiler.is_compiling():
            self.fallbacks[why] += 1

    def reader_of_weights(self: Any) -> str | None:
        """For a class that stores its weights: a reader that a call may have afterwards, or
        None."""
        readers = [hook for hook in self._forward_hooks.values() if not _is_torchs(hook)]
        return "a forward hook, which may read the weights that the original stores" if readers else None

    def setting(self, name: str) -> Any:
        """A setting that `accelerate` was given, or found above the module."""
        return self.__dict__[STATE].get(name)

    def why_not_kernel(self: Any, x: Tensor, dropout_p: float = 0.0) -> str | None:
        """Why no kernel takes tensors like x and this dropout now, or None."""
        if torch._C._get_tracing_state() is not None or torch.onnx.is_in_onnx_export():
            return EXPORTED
        if exporting() and self.setting("export") != "operator":
            return EXPORTED
        if dropout_p >= 1:
            return "everything is dropped"
        if dropout_p != dropout_p:
            return "a dropout of another kind than torch's"
        for name in self.skips:
            if acts_on_calls(self.get_submodule(name)):
                return f"hooks on its {name}, which the kernels do not call"
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        return None if has_kernel(x.device, dtype) else f"no kernel for {dtype} on {x.device.type}"


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is of torch itself, FSDP's say, and reads no weights of attention."""
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def exporting() -> bool:
    """Whether torch.export is at work; False where torch cannot tell (before 2.7)."""
    told: Callable[[], bool] | None = getattr(torch.compiler, "is_exporting", None)
    return told is not None and told()


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel takes tensors of such a device and dtype, of some head width."""
    return any(kernels.why_not_tensors(device, dtype) is None for name, kernels in KERNELS.items() if name != "cuda")


def width_of(projection: nn.Module) -> int:
    """The number of features that a linear layer takes, whatever it is wrapped in.

    Raises:
        AttributeError: there is none in it.
    """
    for part in projection.modules():
        width: Any = getattr(part, "in_features", None)
        if width is not None:
            return int(width)
    raise AttributeError(f"{type(projection).__name__} does not say how many features it takes")


def new_state(**settings: Any) -> dict[str, Any]:
    """State of a module that is about to be accelerated."""
    return {"fallbacks": Counter(), **settings}


Sample = tuple[Tensor, Callable[[Any, Tensor], Tensor]]


class Draw:
    """Small random float32 tensors on the CPU, the same every time, of B sequences of T frames."""

    B = 2

    def __init__(self, T: int) -> None:
        self.T = T
        self._generator = torch.Generator("cpu").manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def frames(self, width: int) -> Tensor:
        """[B, T, width]."""
        return self.normal(self.B, self.T, width)

    def table(self, width: int, past: int | None = None, future: int | None = None) -> Tensor:
        """Encodings [1, past + 1 + future, width], farthest past first: any will do; T - 1 on a
        side if nothing is said."""
        before, after = (self.T - 1 if n is None else n for n in (past, future))
        return self.normal(1, before + 1 + after, width)


Judgement = Callable[[nn.Module, Sequence[nn.Module]], str | None]


def _nothing(module: nn.Module, ancestors: Sequence[nn.Module]) -> str | None:
    return None


@dataclass(frozen=True)
class Peer:
    """An attention class, and the adapter that stands for it.

    Attributes:
        name: of the accelerated class, a Python identifier of its own.
        path: full name of the original class.
        adapter: subclass of `Accelerated` with the `forward` that calls the kernels.
        distribution: the package that holds the class, as pip knows it.
        hashes: by version of the distribution (or the name of another that has a copy),
            `source_hash` of the class as tested; empty for any source.
        refuses: why a module is to be left alone, or None; gets the modules above it, outermost
            first.
        other: why there is nothing to accelerate, a module without relative positions say, or None;
            as `why_not_module`, but no reason to warn, nor for `strict` to raise.
    """

    name: str
    path: str
    adapter: type[Accelerated]
    distribution: str
    hashes: Mapping[str, str] = field(default_factory=dict)
    why_not_module: Judgement = _nothing
    other: Judgement = _nothing

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
            return f"its source cannot be read ({error}); tested: {self.tested()}"
        if found in self.hashes.values():
            return None
        return f"source unknown ({self.distribution} {self.version()}, hash {found}); tested: {self.tested()}"

    def tested(self) -> str:
        return ", ".join(v if " " in v else f"{self.distribution} {v}" for v in self.hashes)

    def version(self) -> str:
        """The installed version of the distribution."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return "of unknown version"
