"""Inkling, Inkling 2 and its loop variant: whole text models, accelerated, give what the originals'
eager attention gives for the same tokens, masks and caches."""

import contextlib
import copy
import inspect
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from inkling_models import (
    GIVEN,
    HOLES,
    LEFT,
    NAMES,
    TOKENS,
    WINDOW,
    L,
    causal_mask,
    logits,
    logits_and_gradients,
    model_of,
)
from layer_helpers import check, compare
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from txl_kernels.integrations import accelerate
from txl_kernels.integrations.adapters import inkling as adapter

EACH = pytest.mark.parametrize("name", NAMES)


@EACH
def test_model_of_several_modalities(name: str) -> None:
    """Its towers are left alone; Inkling's model makes its text model's masks itself."""
    import transformers

    text = model_of(name).config
    towers: dict[str, Any] = {"audio_config": {"text_hidden_size": 32}} if name == "Inkling" else {}
    towers["vision_config"] = {"text_hidden_size": 32, "hidden_size": 16, "num_attention_heads": 2}
    if name != "Inkling":
        towers["vision_config"] |= {"num_hidden_layers": 1, "projection_hidden_dim": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text, **towers, attn_implementation="eager")
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    with contextlib.ExitStack() as stack:
        if name == "Inkling":  # its tower needs SciPy
            path = "transformers.models.inkling.modeling_inkling.InklingVisionModel"
            stack.enter_context(mock.patch(path, return_value=torch.nn.Identity()))
        model = kind(config).eval()
    no_masks = mock.patch("transformers.masking_utils.causal_mask_function", side_effect=AssertionError("a mask"))
    with no_masks, pytest.raises(AssertionError, match="a mask"):
        logits(model)
    report = check(
        model, lambda: logits(model, attention_mask=LEFT), tolerance=2e-5, change=lambda m: no_masks.__enter__()
    )
    no_masks.__exit__(None, None, None)
    prefixes = {row.name.partition(".layers")[0] for row in report.accelerated}
    assert prefixes == {*(["model"] if name == "Inkling" else []), "model.language_model"}


@pytest.mark.parametrize(("given", "checkpointing"), [*((given, False) for given in GIVEN), ("right padding", True)])
@EACH
def test_outputs_and_gradients(name: str, given: str, checkpointing: bool) -> None:
    model = model_of(name).train(checkpointing)
    want = logits_and_gradients(model, GIVEN[given])
    report = accelerate(model, strict=True)
    if checkpointing:
        model.activation_checkpointing_enable()
    with mock.patch.object(adapter, "attend", wraps=adapter.attend) as spied:
        found = logits_and_gradients(model, GIVEN[given])
    assert not report.fallbacks
    assert spied.call_count == (8 if name == "Inkling2Loop" else 4) * (1 + checkpointing)  # again in backward
    assert found.keys() == want.keys()
    for key, value in want.items():
        # Gradients that are sums of many cancelling terms: 4e-5 of the largest.
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4 * float(value.abs().max()) + 1e-7, msg=key)


@pytest.mark.parametrize("given", [given for given in GIVEN if "padding" not in given])
def test_in_float64(given: str, any_dtype: None) -> None:
    """Inkling's own code rounds softmax, convolutions and log scaling to float32. With padding it
    gives NaN, from a softmax in float32 over the lowest numbers of float64."""
    model = model_of("Inkling", experts_implementation="eager").double()  # the default one has no float64
    options = {key: x.double() if x is not None and key == "attention_mask" and x.dim() == 4 else x
               for key, x in GIVEN[given].items()}  # fmt: skip
    want = logits_and_gradients(model, options)
    accelerate(model, strict=True)
    found = logits_and_gradients(model, options)
    for key, value in want.items():
        # The gradient of one factor of all experts is a sum that cancels.
        torch.testing.assert_close(found[key], value, rtol=0, atol=3e-6 * float(value.abs().max()) + 1e-6, msg=key)


@pytest.mark.parametrize("autocast", [False, True])
@EACH
def test_bfloat16(name: str, autocast: bool) -> None:
    """The mean error is at most twice the original's. All experts are used: a choice among them is
    not continuous."""
    model = model_of(name, num_experts_per_tok=4)
    exact = logits(model, attention_mask=LEFT)
    if not autocast:
        kept = {key: x.clone() for key, x in model.state_dict().items()}
        model.to(torch.bfloat16)
        for key, x in [*model.named_parameters(), *model.named_buffers()]:  # as from_pretrained loads them
            if any(part in key for part in model._keep_in_fp32_modules_strict):
                x.data = kept[key]
    errors = []
    for accelerated in (False, True):
        if accelerated:
            report = accelerate(model, strict=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            errors.append(float((logits(model, attention_mask=LEFT).float() - exact).abs().mean()))
    assert 0 < errors[1] < 2 * errors[0]
    assert not report.fallbacks


class Pairs(TorchDispatchMode):
    """Records the results with two axes of L or more elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and sum(n % L == 0 for n in x.shape if n) >= 2:
                self.found.append((str(func), list(x.shape)))
        return out


@pytest.mark.parametrize("given", ["whole", "left padding", "packed rows"])
@EACH
def test_no_tensors_of_all_pairs(name: str, given: str) -> None:
    model = model_of(name)
    with Pairs() as theirs:
        logits(model, **GIVEN[given])
    accelerate(model, strict=True)
    values = mock.patch.object(adapter, "attend", lambda q, k, v, *args, **kwargs: q)  # the reference has some
    with values, Pairs() as ours:
        logits(model, **GIVEN[given])
    assert theirs.found
    assert not ours.found


def hook_tables(model: Any) -> None:
    for layer in model.model.layers[:2]:
        table = getattr(layer.self_attn, "rel_logits_proj", None) or layer.self_attn.relative_position_bias
        table.register_forward_hook(lambda *_: None)


def offload(model: Any) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


ALL_LAYERS = 0  # stands for their number
HOOKS = "hooks on its {table}, which the kernels do not call"
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = {  # arguments, options, fallbacks
    "2D mask with a hole": ({"attention_mask": HOLES}, {}, {"a mask with holes": ALL_LAYERS}),
    "4D mask with a hole": ({"attention_mask": causal_mask(hole=True)}, {}, {"a mask with holes": ALL_LAYERS}),
    "other values": ({"attention_mask": causal_mask() * 1e-39 - 0.1}, {},
                     {"an additive mask of other values than 0 and -inf": ALL_LAYERS}),
    # Two layers get the masks and distances that the text model did not make.
    "hooks, left padding": (GIVEN["left padding"], {"change": hook_tables}, {HOOKS: 2}),
    "hooks, packed rows": (GIVEN["packed rows"], {"change": hook_tables}, {HOOKS: 2}),
    # The table is loaded by the call of its module.
    "offload": (GIVEN["left padding"], {"change": offload}, {HOOKS: ALL_LAYERS}),
    # Layers that are left out need masks and distances; the others accept them.
    "exclude": (GIVEN["left padding"], {"exclude": "model.layers.1"}, {}),
    "include": (GIVEN["left padding"], {"include": "model.layers.1"}, {}),
    # Inkling alone supports SDPA. Its masks are boolean, and None where they are causal.
    "sdpa, whole": ({}, {"implementation": "sdpa"}, {}),
    "sdpa, left padding": (GIVEN["left padding"], {"implementation": "sdpa"}, {}),
    "sdpa, 4D mask": ({"attention_mask": causal_mask(additive=False)}, {"implementation": "sdpa"}, {}),
}  # fmt: skip
CASES = [(name, x) for name in NAMES for x in SCENARIOS if name == "Inkling" or "sdpa" not in x]


@pytest.mark.parametrize(("name", "scenario"), CASES)
def test_logits(name: str, scenario: str) -> None:
    given, options, fallbacks = SCENARIOS[scenario]
    model = model_of(name, options.get("implementation", "eager"))
    layers = 8 if name == "Inkling2Loop" else 4  # two of six run twice
    table = "rel_logits_proj" if name == "Inkling" else "relative_position_bias"
    expected = {reason.format(table=table): count or layers for reason, count in fallbacks.items()}
    options = {key: x for key, x in options.items() if key != "implementation"}
    check(model, lambda: logits(model, **given), expected, 2e-5, **options)


@EACH
def test_hidden_states_and_router_logits(name: str) -> None:
    """transformers collects them by the name of the model's class. Its own hooks, which stay after
    that call, need no masks of all pairs."""
    model = model_of(name)

    def collected() -> list[Tensor]:
        with torch.no_grad():
            out = model(TOKENS, output_hidden_states=True, output_router_logits=True)
        return [*out.hidden_states, *out.router_logits]

    check(model, collected, tolerance=2e-5)
    assert any(layer._forward_hooks for layer in model.model.layers)
    assert not model.model._needs_pair_masks({})


@EACH
def test_window(name: str) -> None:
    """The result is the original's with a mask of four axes of this window."""
    model = model_of(name, sliding_window_size=9)
    want = logits(model, attention_mask=causal_mask())
    accelerate(model, strict=True, window=(8, 0))
    compare(logits(model), want, 2e-5)


def in_pieces(model: Any, lengths: tuple[int, ...], cache: Any = None, mask: Tensor | None = None) -> Tensor:
    """Return logits of calls with a cache, one after the other."""
    found, at = [], 0
    with torch.no_grad():
        for n in lengths:
            given = {} if mask is None else {"attention_mask": mask[:, : at + n]}
            out = model(TOKENS[:, at : at + n], cache=cache, use_cache=True, **given)
            found.append(out.logits)
            cache, at = out.cache, at + n
    result = torch.cat(found, 1)
    return result if mask is None else result[mask.bool()]


# Not padding one token at a time: the originals' convolutions let it through, our output is 0.
@pytest.mark.parametrize(("lengths", "mask"), [((11, 7, 1), None), ((11, 7, 1), LEFT), ((1,) * L, None)])
@EACH
def test_dynamic_cache(name: str, lengths: tuple[int, ...], mask: Tensor | None) -> None:
    """The sliding layers' cache drops keys from the seventh on."""
    model = model_of(name)
    check(model, lambda: in_pieces(model, lengths, mask=mask), tolerance=2e-5)


@EACH
def test_static_cache(name: str) -> None:
    """It also returns its unused room. Inkling's own code reads the number of cached tokens after
    it has grown, so the original is compared with a cache that does not grow in place."""
    from transformers import StaticCache

    model = model_of(name)
    caches = [StaticCache(config=model.config, max_cache_len=24) for _ in range(2)]
    caches = [caches[0], None if name == "Inkling" else caches[1]]
    check(model, lambda: in_pieces(model, (11, 7, 1), caches.pop(), LEFT), tolerance=2e-5)


GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "no cache": {"use_cache": False},
    "candidates": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("kind", GENERATIONS)
@EACH
def test_generation(name: str, kind: str) -> None:
    """Candidates are checked several at a time, and some are removed from the cache."""
    window = 40 if kind == "static" else WINDOW  # the original raises for a static cache longer than the window
    model = model_of(name, sliding_window_size=window)
    rows = slice(0, 1) if kind == "candidates" else slice(None)
    given = {"attention_mask": LEFT[rows], "max_new_tokens": 9, "do_sample": False, **GENERATIONS[kind]}
    theirs = given if (name, kind) != ("Inkling", "static") else given | {"cache_implementation": "dynamic"}
    want = model.generate((TOKENS * LEFT)[rows], **theirs)
    report = accelerate(model, strict=True)
    assert torch.equal(model.generate((TOKENS * LEFT)[rows], **given), want)
    assert want[:, L:].unique().numel() > 3
    assert not report.fallbacks


def test_dropout_is_passed_on() -> None:
    model = model_of("Inkling2", attention_dropout=0.25).train()
    accelerate(model, strict=True)
    with mock.patch.object(adapter, "attend", wraps=adapter.attend) as spied:
        logits(model)
        model.eval()
        logits(model)
    assert [call.kwargs["dropout_p"] for call in spied.call_args_list] == [0.25] * 4 + [0.0] * 4


@pytest.mark.parametrize("kind", ["hidden key", "with kwargs", "of all modules"])
@EACH
def test_hooks_on_layers_get_masks(name: str, kind: str) -> None:
    """A hook that hides a key from a layer (attention knock-out), and hooks that read arguments."""
    theirs, ours = model_of(name), model_of(name)
    accelerate(ours, strict=True)
    found: set[str] = set()

    def knock_out(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., 5:, 4] = torch.finfo(mask.dtype).min
        return args, kwargs | {"attention_mask": mask}

    def record(module: nn.Module, *given: Any) -> None:
        found.update(type(x).__name__ for x in (given[1].values() if len(given) == 3 else given[0]))

    with contextlib.ExitStack() as hooks:
        for attention in (model.model.layers[1].self_attn for model in (theirs, ours)):
            if kind == "hidden key":
                attention.register_forward_pre_hook(knock_out, with_kwargs=True)
            elif kind == "with kwargs":
                attention.register_forward_hook(record, with_kwargs=True)
        if kind == "of all modules":
            hooks.enter_context(nn.modules.module.register_module_forward_pre_hook(record))
        compare(logits(ours, attention_mask=LEFT), logits(theirs, attention_mask=LEFT), 2e-5)
    assert kind == "hidden key" or "Tensor" in found
    assert not {"CausalMask", "CachedKeys"} & found


@EACH
def test_arguments_keep_their_names(name: str) -> None:
    from torch.export import Dim, export

    plain, model = model_of(name), model_of(name)
    accelerate(model, strict=True)
    for accelerated in (model, copy.deepcopy(model)):
        for (label, theirs), ours in zip(plain.named_modules(), accelerated.modules(), strict=True):
            assert inspect.signature(ours.forward) == inspect.signature(theirs.forward), label
    if name != "Inkling":
        return  # the original of Inkling 2 has no such export either
    given: dict[str, Any] = {"input_ids": TOKENS, "use_cache": False}
    shapes = {"input_ids": {1: Dim("L", max=64)}, "use_cache": None}
    with torch.no_grad():
        with pytest.warns(UserWarning, match="an accelerated model is exported"):
            program = export(model.model, (), given, strict=False, dynamic_shapes=shapes)
        found = program.module()(input_ids=TOKENS[:, :11], use_cache=False)
        compare(found.last_hidden_state, plain.model(TOKENS[:, :11], use_cache=False).last_hidden_state, 2e-5)


@EACH
def test_window_of_one_key(name: str) -> None:
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
    compare(torch.cat(parts, 1), whole, 2e-5)


@pytest.mark.nightly
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares results itself, and does not count its parent's memory."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytest.importorskip("matplotlib")
    torch.ones(2**28)  # 1 GiB in this process
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "inkling.py"))
    lengths = {"original": (256, 512), "accelerated": (256, 512, 1024)}
    measured = {way: {n: example["run"](way, n) for n in lengths[way]} for way in lengths}
    example["figure"](tmp_path / "figure.png", measured)
    assert (tmp_path / "figure.png").stat().st_size > 1_000
    found = example["main"](tokens=2048)
    assert found["accelerated"]["forward, MiB"] < found["original"]["forward, MiB"]
    assert found["accelerated"]["forward + backward, MiB"] < found["original"]["forward + backward, MiB"]
