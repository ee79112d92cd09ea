"""WavLM, BEATs, MPNet and T5, whose layers share a relative bias: exactness in float64, and stacks
in which the original answers for a part."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from layer_helpers import both, case_of, check, compare

from implementations.peer_cases import STACKS
from txl_kernels.integrations import Accelerated, accelerate, restore

SHARING = ("wavlm", "espnet beats", "mpnet", "t5", "longt5 local")
OTHER_LAYER = "another layer of its stack is not accelerated"
BY_ORIGINAL = "biases of all pairs, of a layer that the original answered"
BY_ENCODER = "biases of all pairs, of an encoder that is not accelerated"


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference backend")
@pytest.mark.parametrize("name", STACKS)
def test_float64(name: str, any_dtype: None) -> None:
    """The reference computes the original's formula, and all its gradients, up to rounding."""
    case = case_of(name, "right")
    case.module.double()
    own = mock.patch("torch.Tensor.float", lambda x: x) if name in ("longt5 local", "mpt") else contextlib.nullcontext()
    with own:  # its softmax is in float32
        want = both(case, dtype=torch.float64)
    report = accelerate(case.module, strict=True)
    compare(both(case, dtype=torch.float64), want, 1e-12)
    assert not report.fallbacks


PARTS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    *((name, {"include": f"{layers}.[02].*"}, {OTHER_LAYER: 1, BY_ORIGINAL: 1}) for name, layers in
      (("wavlm", "layers"), ("espnet beats", "layers"), ("t5", "block"), ("longt5 local", "block"))),
    ("mpnet", {"exclude": "layer.1"}, {"a layer of its stack is not accelerated": 1, BY_ENCODER: 2}),
    ("mpnet", {"include": "layer.*"}, {BY_ENCODER: 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "selection", "reasons"), PARTS, ids=str)
def test_part_of_a_stack(name: str, selection: dict[str, Any], reasons: dict[str, int]) -> None:
    case = case_of(name)
    want = both(case)
    report = check(case.module, lambda: both(case), reasons, **selection, strict=False)
    accelerate(case.module, strict=True)
    compare(both(case), want)
    assert report.fallbacks == reasons
    assert restore(case.module) == (4 if name == "mpnet" else 3)
    assert all(torch.equal(a, want[n]) for n, a in both(case).items())


@pytest.mark.parametrize("name", SHARING)
def test_one_layer_falls_back(name: str) -> None:
    """It gets biases of distances, and gives its original those of all pairs."""
    case = case_of(name)
    want = both(case)
    report = accelerate(case.module, strict=True)
    middle = [m for m in case.module.modules() if isinstance(m, Accelerated) and m is not case.module][1]
    with mock.patch.object(type(middle), "why_not_kernel", lambda m, *args: "not today" if m is middle else None):
        compare(both(case), want)
    assert report.fallbacks == {"not today": 1}


@pytest.mark.parametrize("name", SHARING)
def test_masks_with_holes_fall_back(name: str) -> None:
    case = case_of(name, "holes")
    shown = (torch.arange(case.x.size(1)) % 7 != 3).expand(case.x.size(0), -1)
    if "t5" in name:
        case.call = lambda f, x: f(inputs_embeds=x, attention_mask=shown).last_hidden_state
    elif name == "wavlm":
        case.call = lambda f, x: f(x.clone(), attention_mask=shown).last_hidden_state
    elif name != "mpnet":
        case.call = lambda f, x: f(x.clone(), ~shown)[0]
    reasons = {"a mask with holes": 3} if name == "mpnet" else {"a mask with holes": 1, BY_ORIGINAL: 2}
    check(case.module, lambda: both(case, gradients=False), reasons, 1e-5)


def test_lora_of_wavlms_projections_does_nothing() -> None:
    """The original reads their weights."""
    from peft import LoraConfig, inject_adapter_in_model

    case = case_of("wavlm")
    plain = both(case)
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False), case.module)
    case.module.requires_grad_()
    assert torch.equal(both(case)["out"], plain["out"])
    check(case.module, lambda: both(case))
