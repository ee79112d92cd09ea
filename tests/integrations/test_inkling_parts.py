"""Inkling's models with changed tables, hooks on layers, adapters, names of arguments, and a window
of one key."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inkling_models import LEFT, NAMES, TOKENS, logits, model_of, same
from torch import Tensor, nn

from txl_kernels.integrations import accelerate

pytestmark = pytest.mark.peers
TABLE = {"Inkling": "rel_logits_proj", "Inkling2": "relative_position_bias", "Inkling2Loop": "relative_position_bias"}


def tables(model: Any) -> list[tuple[nn.Module, str, Any]]:
    """Return the attention module, the name of its table, and the table, of each layer."""
    found = []
    for module in model.modules():
        for name in set(TABLE.values()):
            if name in module._modules:
                found.append((module, name, module._modules[name]))
    assert len(found) >= 4
    return found


def subclass(model: Any) -> None:
    for _, _, table in tables(model):
        own = type(table)
        table.__class__ = type(
            "Twice", (own,), {"forward": lambda self, *given, own=own: 2 * own.forward(self, *given)}
        )


class Around(nn.Module):
    """A wrapper without the table's attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Tensor:
        result: Tensor = 2 * self.inner(*given)
        return result


class Passing(Around):
    """A wrapper that passes the table's attributes on."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def wrapper(model: Any) -> None:
    for attention, name, table in tables(model):
        setattr(attention, name, Around(table))


def passing_wrapper(model: Any) -> None:
    for attention, name, table in tables(model):
        setattr(attention, name, Passing(table))


def adapter(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(2)
    (name,) = {name for _, name, _ in tables(model)}
    config = LoraConfig(r=4, target_modules=[], target_parameters=[name + ".proj"], init_lora_weights=False)
    inject_adapter_in_model(config, model)


CHANGES = (subclass, wrapper, passing_wrapper, adapter)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["Inkling", "Inkling2"])
def test_a_changed_table(name: str, change: Callable[[Any], None]) -> None:
    theirs, after, before, plain = (model_of(name) for _ in range(4))
    for model in (theirs, before):
        change(model)
    reports = [accelerate(after, strict=True), accelerate(before, strict=True)]
    change(after)
    want = logits(theirs, attention_mask=LEFT)
    assert not torch.allclose(want, logits(plain, attention_mask=LEFT), rtol=1e-2, atol=1e-2)
    for model, report in zip((after, before), reports, strict=True):
        same(logits(model, attention_mask=LEFT), want)
        (reason,) = report.fallbacks
        assert reason == f"another class or forward on its {TABLE[name]}, which the kernels do not call"


@pytest.mark.parametrize("first", ["the patch", "accelerate"])
def test_a_table_whose_class_is_patched(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = model_of("Inkling"), model_of("Inkling")
    kind = type(tables(ours)[0][2])
    own = kind.forward
    if first == "accelerate":
        report = accelerate(ours, strict=True)
    monkeypatch.setattr(kind, "forward", lambda self, *given: 2 * own(self, *given))
    if first == "the patch":
        report = accelerate(ours, strict=True)
    same(logits(ours), logits(theirs))
    assert sum(report.fallbacks.values()) == 4


@pytest.mark.parametrize("kind", ["hidden key", "with kwargs", "of all modules"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_layers_get_masks(name: str, kind: str) -> None:
    """Attention knock-out, a hook that hides a key from a layer; one that reads arguments after the
    call."""
    theirs, ours = model_of(name), model_of(name)
    accelerate(ours, strict=True)
    seen: list[Any] = []

    def knock_out(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., 5:, 4] = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": mask}

    def note(module: nn.Module, *given: Any) -> None:
        seen.append([type(x) for x in given[1].values()] if len(given) == 3 else [])

    for model in (theirs, ours):
        attention = model.model.layers[1].self_attn
        if kind == "hidden key":
            attention.register_forward_pre_hook(knock_out, with_kwargs=True)
        elif kind == "with kwargs":
            attention.register_forward_hook(note, with_kwargs=True)
    handle = None
    if kind == "of all modules":
        handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        same(logits(ours, attention_mask=LEFT), logits(theirs, attention_mask=LEFT))
    finally:
        if handle is not None:
            handle.remove()
    assert kind == "hidden key" or seen
    assert not any(found.__name__ in ("CausalMask", "CachedKeys") for given in seen for found in given)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_do_not_need_masks_of_all_pairs(name: str) -> None:
    """transformers' own hooks, which stay after the first call that collects hidden states, read
    none."""
    model = model_of(name)
    accelerate(model, strict=True)
    with torch.no_grad():
        model(TOKENS, output_hidden_states=True)
    assert any(layer._forward_hooks for layer in model.model.layers)
    assert not model.model._needs_pair_masks({})


@pytest.mark.parametrize("name", NAMES)
def test_arguments_keep_their_names(name: str) -> None:
    from torch.export import Dim, export

    plain, model = model_of(name), model_of(name)
    accelerate(model, strict=True)
    for (label, theirs), ours in zip(plain.named_modules(), model.modules(), strict=True):
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward), label
    if name != "Inkling":
        return  # the original of Inkling 2 has no such export either
    given: dict[str, Any] = {"input_ids": TOKENS, "use_cache": False}
    shapes = {"input_ids": {1: Dim("L", max=64)}, "use_cache": None}
    with torch.no_grad():
        with pytest.warns(UserWarning, match="an accelerated model is exported"):
            program = export(model.model, (), given, strict=False, dynamic_shapes=shapes)
        found = program.module()(input_ids=TOKENS[:, :11], use_cache=False)
        same(found.last_hidden_state, plain.model(TOKENS[:, :11], use_cache=False).last_hidden_state)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_one_key(name: str) -> None:
    """transformers' cache keeps all keys of such a layer, and its original sees them all."""
    model = model_of(name, sliding_window_size=1)
    accelerate(model, strict=True)
    with torch.no_grad():
        whole = model(TOKENS).logits
        first = model(TOKENS[:, :5], use_cache=True)
        cache, parts = first.cache, [first.logits]
        for piece in TOKENS[:, 5:].split([1, 3, 1, 9], 1):
            out = model(piece, cache=cache, use_cache=True)
            parts.append(out.logits)
    same(torch.cat(parts, 1), whole)


def test_a_copy_of_an_accelerated_model_keeps_the_names() -> None:
    model = model_of("Inkling")
    names = list(inspect.signature(model.model.forward).parameters)
    accelerate(model, strict=True)
    assert list(inspect.signature(copy.deepcopy(model).model.forward).parameters) == names
