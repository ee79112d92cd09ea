"""Parts of an attention module that the original calls and the kernels read past: exactly of a
known class with its own forward and without hooks, else the original answers, and it is counted."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layer_helpers import both, compare
from test_seams import ONE_EACH, case_of
from torch import Tensor, nn

from txl_kernels.integrations import Accelerated, accelerate, peer, restore
from txl_kernels.integrations.source import ReplacedCode, check_code

pytestmark = pytest.mark.peers
REASONS = (
    "which the kernels do not call", "a dropout of another kind", "a forward hook, which may read the weights",
)  # fmt: skip
SHARED = "biases of all pairs, of a layer that the original answered"  # after it in its stack


def attentions(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, Accelerated)]


def parts(module: nn.Module) -> list[tuple[Any, str]]:
    return [(kernel, name) for kernel in attentions(module) for name in kernel.skips]


@pytest.fixture(scope="module")
def with_parts() -> list[str]:
    """The cases whose adapters read past a part."""
    found = []
    for name in (*ONE_EACH, "xlnet"):
        case = case_of(name)
        accelerate(case.module, strict=True, weights="none")
        if parts(case.module):
            found.append(name)
    assert len(found) > 12
    return found


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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_other_part_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ONE_EACH, "xlnet"):
        case, twin = case_of(name), case_of(name)
        missing = called_by(twin, False, monkeypatch) - called_by(case, True, monkeypatch)
        skipped = {
            f"{where}.{part}".removeprefix(".")
            for where, module in case.module.named_modules()
            if isinstance(module, Accelerated)
            for part in module.skips
        }
        accelerated = {where for where, module in case.module.named_modules() if isinstance(module, Accelerated)}
        assert missing - accelerated <= skipped, name


def a_hook(module: nn.Module, part: str) -> Callable[[], None]:
    return module.get_submodule(part).register_forward_hook(lambda m, given, out: out * 1.5).remove


def a_hook_of_all_modules(module: nn.Module, part: str) -> Callable[[], None]:
    it = module.get_submodule(part)
    register = nn.modules.module.register_module_forward_hook
    return register(lambda m, given, out: out * 1.5 if m is it else None).remove


def a_hook_before_all_modules(module: nn.Module, part: str) -> Callable[[], None]:
    it = module.get_submodule(part)
    register = nn.modules.module.register_module_forward_pre_hook
    return register(lambda m, given: (given[0] * 1.5, *given[1:]) if m is it else None).remove


def a_forward_of_its_own(module: nn.Module, part: str) -> Callable[[], None]:
    it: Any = module.get_submodule(part)
    it.forward = types.MethodType(lambda self, *given: type(self).forward(self, *given) * 1.5, it)
    return lambda: delattr(it, "forward")


def another_forward_of_its_class(module: nn.Module, part: str) -> Callable[[], None]:
    kind: Any = type(module.get_submodule(part))
    own = kind.forward
    kind.forward = lambda self, *given, **named: own(self, *given, **named) * 1.5
    return lambda: setattr(kind, "forward", own)


def a_subclass(module: nn.Module, part: str) -> Callable[[], None]:
    it = module.get_submodule(part)
    own = type(it)
    it.__class__ = type(own.__name__, (own,), {"forward": lambda self, *given: own.forward(self, *given) * 1.5})
    return lambda: setattr(it, "__class__", own)


CHANGES = (
    a_hook, a_hook_of_all_modules, a_hook_before_all_modules, a_forward_of_its_own, another_forward_of_its_class,
    a_subclass,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_part(change: Callable[[nn.Module, str], Callable[[], None]], with_parts: list[str]) -> None:
    """A dropout after the softmax, FireRedASR's softmax, Gemma's position scores, each in turn."""
    for name in with_parts:
        case = case_of(name)
        accelerate(case.module, strict=True, weights="none")
        for kernel, part in parts(case.module)[:3]:
            undo = change(kernel, part)
            try:
                found = both(case, gradients=False)
                told = {reason for it in attentions(case.module) for reason in it.fallbacks} - {SHARED}
                assert told, (name, part)
                assert all(any(reason in x for reason in REASONS) for x in told), told
                restore(case.module)
                compare(found, both(case, gradients=False))
            finally:
                undo()
            accelerate(case.module, strict=True, weights="none")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_backward_hooks_of_all_modules_act() -> None:
    case = case_of("nemo")
    report = accelerate(case.module, strict=True)
    handle = nn.modules.module.register_module_full_backward_hook(lambda m, grads, of_out: None)
    try:
        both(case)
    finally:
        handle.remove()
    assert list(report.fallbacks) == ["hooks on its dropout, which the kernels do not call"]


@pytest.fixture
def replaced_forward() -> Iterator[Callable[[type, str], None]]:
    """A function that replaces a method of a class until the test ends."""
    before: list[tuple[Any, str, Any]] = []

    def replace(kind: Any, name: str) -> None:
        own = getattr(kind, name)
        before.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, lambda self, *given, **named: own(self, *given, **named) * 1.5)

    yield replace
    for kind, name, own in before:
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)


@pytest.mark.parametrize(
    ("name", "method"),
    [("nemo", "forward"), ("nemo", "rel_shift"), ("espnet", "forward_attention"), ("espnet", "forward")],
)
def test_a_class_whose_method_was_replaced(
    name: str, method: str, replaced_forward: Callable[[type, str], None]
) -> None:
    """Its source no longer says what it computes."""
    case = case_of(name)
    replaced_forward(type(case.module), method)
    with pytest.warns(UserWarning, match=f"{method} is not that of its source: it was replaced"):
        report = accelerate(case.module)
    assert not report.accelerated


@pytest.mark.parametrize("name", ["nemo", "espnet", "xlnet"])
def test_a_class_whose_method_is_replaced_later(name: str, replaced_forward: Callable[[type, str], None]) -> None:
    case = case_of(name)
    report = accelerate(case.module, strict=True)
    (kernel,) = attentions(case.module)
    replaced_forward(kernel.original, kernel.method)
    found = both(case, gradients=False)
    assert list(report.fallbacks) == [f"another {kernel.method} of its class"]
    restore(case.module)
    compare(found, both(case, gradients=False))


def test_a_method_replaced_on_the_instance() -> None:
    case = case_of("nemo")
    case.module.rel_shift = lambda x: x
    with pytest.warns(UserWarning, match="its rel_shift was replaced on the instance"):
        assert not accelerate(case.module).accelerated


class Alternate(nn.Dropout):
    """A dropout of somebody's: every other number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.size(-1)) % 2) * 2


@pytest.mark.parametrize("name", ["espnet", "xlnet", "speechbrain", "nemo"])
def test_a_dropout_of_another_kind(name: str) -> None:
    answers = []
    for accelerated in (False, True):
        case = case_of(name)
        part = "dropout_att" if name == "speechbrain" else "dropout"
        setattr(case.module, part, Alternate(0.5))
        if accelerated:
            report = accelerate(case.module, strict=True)
        answers.append(both(case, gradients=False))
    assert torch.equal(answers[0]["out"], answers[1]["out"])
    assert list(report.fallbacks) == ["a dropout of another kind than torch's"]


class Inheriting(Alternate):
    pass


def test_an_inherited_forward_that_was_replaced(replaced_forward: Callable[[type, str], None]) -> None:
    check_code(Inheriting)
    replaced_forward(Inheriting, "forward")
    with pytest.raises(ReplacedCode, match="forward is not that of its source: it was replaced"):
        check_code(Inheriting)
