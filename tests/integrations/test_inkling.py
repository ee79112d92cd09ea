"""Inkling, Inkling 2 and its loop variant, whole text models: what the originals' eager attention
gives, by the same tokens, masks and caches."""

import contextlib
import copy
import os
import pickle
import runpy
import sys
from collections.abc import Callable
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
    L,
    causal_mask,
    logits,
    logits_and_gradients,
    model_of,
    same,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from txl_kernels.integrations import accelerate, restore
from txl_kernels.integrations.adapters import inkling as adapter

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_several_modalities(name: str) -> None:
    """Its towers are left alone; Inkling's makes its text model's masks itself."""
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
    want = logits(model, attention_mask=LEFT)
    report = accelerate(model, strict=True)
    assert {row.name.partition(".layers")[0] for row in report.accelerated} == {
        *(["model"] if name == "Inkling" else []), "model.language_model"
    }  # fmt: skip
    with no_masks:
        same(logits(model, attention_mask=LEFT), want)
    assert not report.fallbacks


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients(name: str, given: str) -> None:
    model = model_of(name)
    want = logits_and_gradients(model, GIVEN[given])
    report = accelerate(model, strict=True)
    found = logits_and_gradients(model, GIVEN[given])
    assert not report.fallbacks
    assert found.keys() == want.keys()
    for key, value in want.items():
        # Gradients that are sums of many cancelling terms: 4e-5 of the largest.
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4 * float(value.abs().max()) + 1e-7, msg=key)


@pytest.mark.parametrize("given", [given for given in GIVEN if "padding" not in given])
def test_in_float64(given: str, any_dtype: None) -> None:
    """Inkling's own code rounds softmax, convolutions and log scaling to float32. With padding, it
    gives NaN: the softmax in float32 is over the lowest numbers of float64."""
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
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str, autocast: bool) -> None:
    """As near to float32 as the original's own, on average. All experts are taken: a choice among
    them would jump."""
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


def test_sdpa() -> None:
    """Which Inkling alone supports. Its masks are boolean, and left out where they are causal."""
    for given in ({}, GIVEN["left padding"], {"attention_mask": causal_mask(additive=False)}):
        model = model_of("Inkling", "sdpa")
        want = logits(model, **given)
        report = accelerate(model, strict=True)
        same(logits(model, **given), want)
        assert not report.fallbacks


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing(name: str) -> None:
    model = model_of(name).train()
    given = GIVEN["right padding"]
    want = logits_and_gradients(model, given)
    accelerate(model, strict=True)
    model.activation_checkpointing_enable()
    with mock.patch.object(adapter, "attend", wraps=adapter.attend) as spied:
        found = logits_and_gradients(model, given)
    assert spied.call_count == 2 * (8 if name == "Inkling2Loop" else 4)  # forward, and again in backward
    for key, value in want.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-4 * float(value.abs().max()) + 1e-7, msg=key)


class Pairs(TorchDispatchMode):
    """The shapes of results with two axes of L or more elements."""

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
@pytest.mark.parametrize("name", NAMES)
def test_no_mask_and_no_distances_of_all_pairs(name: str, given: str) -> None:
    model = model_of(name)
    with Pairs() as theirs:
        logits(model, **GIVEN[given])
    accelerate(model, strict=True)
    values = mock.patch.object(adapter, "attend", lambda q, k, v, *args, **kwargs: q)  # a kernel has none, either
    with values, Pairs() as ours:
        logits(model, **GIVEN[given])
    assert theirs.found
    assert not ours.found


def fall_backs(model: Any, run: Callable[[], Tensor], **accelerated: Any) -> dict[str, int]:
    """Check that results are the original's, and return the calls that it answered, by reason."""
    want = run()
    report = accelerate(model, **accelerated)
    same(run(), want)
    return report.fallbacks


@pytest.mark.parametrize("name", NAMES)
def test_what_the_original_answers(name: str) -> None:
    layers = 8 if name == "Inkling2Loop" else 4  # two of six run twice
    with_holes = "a mask with holes"
    model = model_of(name)
    assert fall_backs(model, lambda: logits(model, attention_mask=HOLES)) == {with_holes: layers}
    model = model_of(name)
    assert fall_backs(model, lambda: logits(model, attention_mask=causal_mask(hole=True))) == {with_holes: layers}
    model = model_of(name)
    biased = causal_mask() * 1e-39 - 0.1
    assert list(fall_backs(model, lambda: logits(model, attention_mask=biased))) == [
        "an additive mask of other values than 0 and -inf"
    ]
    model = model_of(name)
    wanted = "attention weights asked for"
    assert fall_backs(model, lambda: model(TOKENS, output_attentions=True).attentions[-1]) == {wanted: layers}


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_router_logits(name: str) -> None:
    """transformers collects them by the name of the model's class."""
    model = model_of(name)

    def collected() -> list[Tensor]:
        with torch.no_grad():
            out = model(TOKENS, output_hidden_states=True, output_router_logits=True)
        return [*out.hidden_states, *out.router_logits]

    want = collected()
    report = accelerate(model, strict=True)
    for theirs, ours in zip(want, collected(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not report.fallbacks


@pytest.mark.parametrize("given", ["left padding", "packed rows"])
@pytest.mark.parametrize("name", NAMES)
def test_one_layer_that_falls_back(name: str, given: str) -> None:
    """It gets the mask and the distances that the text model did not make."""
    model = model_of(name)
    table = "rel_logits_proj" if name == "Inkling" else "relative_position_bias"
    hidden: list[int] = []
    for layer in model.model.layers[:2]:
        getattr(layer.self_attn, table).register_forward_hook(lambda *_: hidden.append(1))
    found = fall_backs(model, lambda: logits(model, **GIVEN[given]))
    assert found == {f"hooks on its {table}, which the kernels do not call": 2}
    assert len(hidden) == 4


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_offloaded(name: str) -> None:
    """The table's, too, which the original loads by the call of its module."""
    hf = pytest.importorskip("accelerate")
    model = model_of(name)
    want = logits(model, attention_mask=LEFT)
    report = accelerate(model, strict=True)
    hf.cpu_offload(model, execution_device=torch.device("cpu"))
    same(logits(model, attention_mask=LEFT), want)
    (reason,) = report.fallbacks
    assert reason.startswith("hooks on its rel")


@pytest.mark.parametrize("selection", ["exclude", "include"])
@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_model(name: str, selection: str) -> None:
    """Layers that are left out need masks and distances; the others take theirs."""
    model = model_of(name)
    assert not fall_backs(model, lambda: logits(model, attention_mask=LEFT), **{selection: "model.layers.1"})


@pytest.mark.parametrize("name", NAMES)
def test_a_window(name: str) -> None:
    """As the original with a mask of four axes, which has this window in sliding layers, too."""
    model = model_of(name, sliding_window_size=9)
    want = logits(model, attention_mask=causal_mask())
    accelerate(model, strict=True, window=(8, 0))
    same(logits(model), want)


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles(name: str) -> None:
    model = model_of(name)
    want, kinds = logits(model), [type(module) for module in model.modules()]
    report = accelerate(model, strict=True)
    layers = [f"model.layers.{i}.self_attn" for i in range(len(model.model.layers))]
    assert [row.name for row in report.accelerated] == ["model", *layers]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(logits(copied), want)
    assert restore(model) == 1 + len(layers)
    assert [type(module) for module in model.modules()] == kinds


def test_dropout_is_passed_on() -> None:
    model = model_of("Inkling2", attention_dropout=0.25).train()
    accelerate(model, strict=True)
    with mock.patch.object(adapter, "attend", wraps=adapter.attend) as spied:
        logits(model)
        model.eval()
        logits(model)
    assert [call.kwargs["dropout_p"] for call in spied.call_args_list] == [0.25] * 4 + [0.0] * 4


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str) -> None:
    """In one graph, as the original without a cache."""
    model = model_of(name)
    given: dict[str, Any] = {"attention_mask": LEFT, "use_cache": False}
    want = logits(model, **given)
    report = accelerate(model, strict=True)
    same(logits(torch.compile(model, backend="eager", fullgraph=True), **given), want)
    assert not report.fallbacks


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares results itself, and what its parent has taken is not counted."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    pytest.importorskip("matplotlib")
    torch.ones(2**28)  # 1 GiB in this process
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "inkling.py"))
    example["figure"](tmp_path / "figure.png", {"original": (256, 512), "accelerated": (256, 512, 1024)})
    assert (tmp_path / "figure.png").stat().st_size > 1_000
    found = example["main"](tokens=2048)
    assert found["accelerated"]["forward, MiB"] < found["original"]["forward, MiB"]
    assert found["accelerated"]["both ways, MiB"] < found["original"]["both ways, MiB"]
