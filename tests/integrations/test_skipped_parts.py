"""Parts of an attention module that the original calls and the kernels do not: a dropout after the
softmax, FireRedASR's softmax, Gemma 3n's position scores, Inkling's table of distances. Unless a
part is exactly of a known class with its own forward and without hooks, the original answers, and
the call is counted."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import EACH_ADAPTER, both, case_of, compare
from torch import Tensor, nn

from txl_kernels.integrations import Accelerated, accelerate, peer, restore
from txl_kernels.integrations.source import ReplacedCode, check_code

CASES = (*EACH_ADAPTER, "xlnet", "Inkling", "Inkling2")
REASONS = (
    "which the kernels do not call", "a dropout of another kind than torch's", "a forward hook, which may read the weights",
)  # fmt: skip
SHARED = "biases of all pairs, of a layer that the original answered"  # the reason of later layers in its stack


def attentions(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, Accelerated)]


def called_by(case: Any, accelerated: bool, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the modules that a call calls."""
    if accelerated:
        accelerate(case.module, strict=True, weights="none")
    called = set()
    for name, module in case.module.named_modules():
        if not isinstance(module, Accelerated):

            def forward(*args: Any, name: str = name, own: Any = module.forward, **kwargs: Any) -> Any:
                called.add(name)
                return own(*args, **kwargs)

            module.forward = forward
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(peer, "why_not_skipped", lambda *given: None)
        case.call(case.module, case.x)
    assert not any(it.fallbacks for it in attentions(case.module))
    return called


@pytest.mark.parametrize("name", CASES)
def test_every_other_part_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, twin = case_of(name), case_of(name)
    missing = called_by(twin, False, monkeypatch) - called_by(case, True, monkeypatch)
    accelerated = {where: m for where, m in case.module.named_modules() if isinstance(m, Accelerated)}
    skipped = {f"{where}.{part}".removeprefix(".") for where, module in accelerated.items() for part in module.skips}
    assert missing - accelerated.keys() <= skipped


Undo = Callable[[], object]


def a_hook(module: nn.Module, part: str) -> Undo:
    return module.get_submodule(part).register_forward_hook(lambda m, given, out: out * 1.5).remove


def hook_of_all_modules(kind: str) -> Callable[[nn.Module, str], Undo]:
    """Return a change by a hook of all modules, which multiplies a part's output or input."""
    register = getattr(nn.modules.module, f"register_module_{kind}")

    def change(module: nn.Module, part: str) -> Undo:
        it = module.get_submodule(part)

        def hook(m: nn.Module, given: Any, out: Any = None) -> Any:
            if m is not it or "backward" in kind:
                return None
            return (given[0] * 1.5, *given[1:]) if "pre" in kind else out * 1.5

        return register(hook).remove  # type: ignore[no-any-return]

    change.__name__ = f"{kind}_of_all_modules"
    return change


def a_forward_of_the_instance(module: nn.Module, part: str) -> Undo:
    it: Any = module.get_submodule(part)
    it.forward = types.MethodType(lambda self, *given: type(self).forward(self, *given) * 1.5, it)
    return lambda: delattr(it, "forward")


def another_forward_of_the_class(module: nn.Module, part: str) -> Undo:
    kind: Any = type(module.get_submodule(part))
    own = kind.forward
    kind.forward = lambda self, *given, **named: own(self, *given, **named) * 1.5
    return lambda: setattr(kind, "forward", own)


def a_subclass(module: nn.Module, part: str) -> Undo:
    it = module.get_submodule(part)
    own = type(it)
    it.__class__ = type(own.__name__, (own,), {"forward": lambda self, *given: own.forward(self, *given) * 1.5})
    return lambda: setattr(it, "__class__", own)


def lora_of_a_parameter(module: nn.Module, part: str) -> Undo | None:
    from peft import LoraConfig, inject_adapter_in_model

    inner = module.get_submodule(part)
    if not isinstance(getattr(inner, "proj", None), nn.Parameter):  # Inkling's table
        return None
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=[], target_parameters=[f"{part}.proj"], init_lora_weights=False)
    inject_adapter_in_model(config, module)
    return lambda: setattr(module, part, inner)


CHANGES = (
    a_hook, *map(hook_of_all_modules, ("forward_hook", "forward_pre_hook", "full_backward_hook")),
    a_forward_of_the_instance, another_forward_of_the_class, a_subclass, lora_of_a_parameter,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:For backward hooks to be called, module output should be a Tensor")
@pytest.mark.parametrize("first", ["accelerate", "change"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_part(change: Callable[[nn.Module, str], Undo | None], first: str) -> None:
    tried = set()
    for name in CASES:
        case = case_of(name)
        accelerate(case.module, strict=True, weights="none")
        parts = [(m, part) for m in attentions(case.module) for part in m.skips]
        for kernel, part in parts[: 3 if first == "accelerate" else 1]:
            of_torch = type(kernel.get_submodule(part)) in (nn.Dropout, nn.Identity)
            if first == "change":
                if of_torch and change is another_forward_of_the_class:  # a patch of torch itself is not noticed
                    continue
                restore(case.module)
            undo = change(kernel, part)
            if undo is not None:
                tried.add(name)
                try:
                    accelerate(case.module, strict=True, weights="none")
                    found = both(case, gradients=False)
                    reasons = {reason for it in attentions(case.module) for reason in it.fallbacks} - {SHARED}
                    assert reasons, (name, part)
                    assert all(any(reason in x for reason in REASONS) for x in reasons), reasons
                    restore(case.module)
                    compare(found, both(case, gradients=False))
                finally:
                    undo()
            accelerate(case.module, strict=True, weights="none")
    assert len(tried) > 12 or (tried and change in (lora_of_a_parameter, another_forward_of_the_class))


@pytest.mark.parametrize("name", ["nemo", "espnet", "xlnet"])
def test_class_whose_method_is_replaced_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    report = accelerate(case.module, strict=True)
    (kernel,) = attentions(case.module)
    own = getattr(kernel.original, kernel.method)
    monkeypatch.setattr(kernel.original, kernel.method, lambda self, *given, **named: own(self, *given, **named) * 1.5)
    found = both(case, gradients=False)
    assert list(report.fallbacks) == [f"another {kernel.method} of its class"]
    restore(case.module)
    compare(found, both(case, gradients=False))


class Doubled(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Inheriting(Doubled):
    pass


def test_inherited_forward_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    check_code(Inheriting)
    monkeypatch.setattr(Inheriting, "forward", lambda self, x: x)
    with pytest.raises(ReplacedCode, match="forward is not that of its source: it was replaced"):
        check_code(Inheriting)
