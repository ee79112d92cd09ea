"""WavLM, BEATs, MPNet and T5, whose layers share relative biases: whole models, layers of both
kinds in a stack, and what wraps the layers' parts."""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
from layer_helpers import both, compare
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import STACKS, make
from txl_kernels.integrations import Accelerated, accelerate, explain, restore

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask"),  # WavLM's
]
SHARING = ("wavlm", "espnet beats", "mpnet", "t5", "longt5 local")
LENGTHS = (60, 41, 24)


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference backend")
@pytest.mark.parametrize("masks", ["none", "right", "left"])
@pytest.mark.parametrize("name", STACKS)
def test_float64(name: str, masks: str, any_dtype: None) -> None:
    """The formula is the original's, to the last digits, with all gradients."""
    case = make(name, masks)
    case.module.eval().double()
    own = mock.patch("torch.Tensor.float", lambda x: x) if name == "longt5 local" else contextlib.nullcontext()
    with own:  # its softmax is in float32
        want = both(case, dtype=torch.float64)
    report = accelerate(case.module, strict=True)
    compare(both(case, dtype=torch.float64), want, 1e-12)
    assert not report.fallbacks


def wavlm(stable: bool) -> Any:
    m = bare_peers.transformers("wavlm")
    config = m.WavLMConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
        conv_stride=(4, 2), conv_kernel=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0, layerdrop=0.0, do_stable_layer_norm=stable, num_buckets=20, max_bucket_distance=30,
    )  # fmt: skip
    return m.WavLMModel(config).eval()


@pytest.mark.parametrize("stable", [False, True])
def test_wavlm_whole(stable: bool) -> None:
    torch.manual_seed(0)
    model = wavlm(stable)
    x, samples = torch.randn(3, 480), torch.tensor(LENGTHS).unsqueeze(1) * 8
    mask = (torch.arange(480) < samples).long()

    def read() -> list[Tensor]:
        with torch.no_grad():
            out = model(x, attention_mask=mask).last_hidden_state
        return [out[b, : max(out.size(1) * n // max(LENGTHS) - 2, 1)] for b, n in enumerate(LENGTHS)]

    before = read()
    report = accelerate(model, strict=True)
    kind = type(report.rows[0].module)
    with mock.patch.object(kind, "compute_bias", side_effect=AssertionError("a bias of all pairs")):
        torch.testing.assert_close(read(), before, atol=2e-4, rtol=1e-3)
    assert len(report.accelerated) == 3
    assert not report.fallbacks
    with torch.no_grad():
        found = model(x, output_attentions=True).attentions
    assert report.fallbacks == {"attention weights asked for": 3}
    restore(model)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(found, model(x, output_attentions=True).attentions, strict=True))


def test_wavlm_in_training() -> None:
    """With layers dropped at random and recomputed: the same layers, the same gradients."""
    torch.manual_seed(0)
    model = wavlm(False)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif hasattr(part, "gru_rel_pos_linear"):
            part.dropout = 0.0
    model.config.layerdrop = 0.4
    model.activation_checkpointing_enable()
    model.train()
    x = torch.randn(2, 480)

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        model(x).last_hidden_state.square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    report = accelerate(model, strict=True)
    found = gradients()
    assert sum("q_proj.weight" in n for n in want) == 2  # one layer was dropped
    compare(found, want)
    assert not report.fallbacks


def test_mpnet_whole() -> None:
    torch.manual_seed(0)
    m = bare_peers.transformers("mpnet")
    config = m.MPNetConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=40
    )
    model = m.MPNetModel(config).eval()
    tokens = torch.randint(4, 40, (3, 60))
    mask = (torch.arange(60) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    with torch.no_grad():
        before = model(tokens, attention_mask=mask)
        report = accelerate(model, strict=True)
        after = model(tokens, attention_mask=mask)
        assert not report.fallbacks
        weights = model(tokens, attention_mask=mask, output_attentions=True).attentions
    assert len(report.accelerated) == 4  # the encoder computes the biases
    torch.testing.assert_close(after.pooler_output, before.pooler_output, atol=2e-4, rtol=1e-3)
    found, want = (x.last_hidden_state[mask.bool()] for x in (after, before))
    torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-3)
    assert report.fallbacks == {"attention weights asked for": 3}
    restore(model)
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, output_attentions=True).attentions
    for got, exact in zip(weights, own, strict=True):  # those behind a layer of ours differ in last bits
        torch.testing.assert_close(got, exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in SHARING if name != "mpnet"])
def test_a_part_of_a_stack(name: str) -> None:
    case = make(name, "right")
    case.module.eval()
    want = both(case)
    report = accelerate(case.module, include="block.[02].*" if "t5" in name else "layers.[02].*")
    compare(both(case), want)
    assert report.fallbacks == {
        "another layer of its stack is not accelerated": 1,
        "biases of all pairs, of a layer that the original answered": 1,
    }
    accelerate(case.module, strict=True)
    counted = dict(report.fallbacks)
    compare(both(case), want)
    assert report.fallbacks == counted
    assert restore(case.module) == 3
    assert all(torch.equal(a, want[n]) for n, a in both(case).items())


OF_MPNET: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "all but a layer": ({"exclude": "layer.1"}, {
        "a layer of its stack is not accelerated": 1,
        "biases of all pairs, of an encoder that is not accelerated": 2,
    }),
    "all but the encoder": ({"include": "layer.*"}, {
        "biases of all pairs, of an encoder that is not accelerated": 3,
    }),
}  # fmt: skip


@pytest.mark.parametrize("part", OF_MPNET)
def test_a_part_of_mpnet(part: str) -> None:
    selection, reasons = OF_MPNET[part]
    case = make("mpnet", "right")
    case.module.eval()
    want = both(case)
    report = accelerate(case.module, **selection)
    compare(both(case), want)
    assert report.fallbacks == reasons


@pytest.mark.parametrize("name", SHARING)
def test_one_layer_falls_back(name: str) -> None:
    """It is given biases of distances, and gives its original those of all pairs."""
    case = make(name, "right")
    case.module.eval()
    want = both(case)
    report = accelerate(case.module, strict=True)
    middle = [m for m in case.module.modules() if isinstance(m, Accelerated) and m is not case.module][1]
    with mock.patch.object(type(middle), "why_not_kernel", lambda m, *args: "not today" if m is middle else None):
        compare(both(case), want)
    assert report.fallbacks == {"not today": 1}


@pytest.mark.parametrize("name", SHARING)
def test_holes_fall_back(name: str) -> None:
    case = make(name, "holes")
    shown = (torch.arange(case.x.size(1)) % 7 != 3).expand(case.x.size(0), -1)
    if "t5" in name:
        case.call = lambda f, x: f(inputs_embeds=x, attention_mask=shown).last_hidden_state
    elif name == "wavlm":
        case.call = lambda f, x: f(x.clone(), attention_mask=shown).last_hidden_state
    elif name != "mpnet":
        case.call = lambda f, x: f(x.clone(), ~shown)[0]
    case.module.eval()
    with torch.no_grad():
        want = case.call(case.module, case.x)
        report = accelerate(case.module, strict=True)
        found = case.call(case.module, case.x)
    others = "biases of all pairs, of a layer that the original answered"
    assert report.fallbacks == ({"a mask with holes": 3} if name == "mpnet" else {"a mask with holes": 1, others: 2})
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_lora() -> None:
    """On projections: WavLM's original reads their weights, so that LoRA does nothing there."""
    from peft import LoraConfig, inject_adapter_in_model

    case = make("wavlm", "right")
    case.module.eval()
    plain = both(case)
    torch.manual_seed(3)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False), case.module)
    case.module.requires_grad_()
    want = both(case)
    assert torch.equal(want["out"], plain["out"])
    report = accelerate(case.module, strict=True)
    compare(both(case), want)
    assert not report.fallbacks


@pytest.mark.parametrize("name", ["wavlm", "espnet beats"])
def test_a_window(name: str) -> None:
    """The last frame does not change with one 6 before it, in one layer."""
    case = make(name)
    case.module.eval()
    del case.module.layers[1:]
    if hasattr(case.module, "pos_conv_embed"):
        case.module.pos_conv_embed = nn.Identity()
    accelerate(case.module, strict=True, window=(5, 1))
    with torch.no_grad():
        before, changed = case.call(case.module, case.x), []
        for distance in (6, 5):
            x = case.x.clone()
            x[:, 44 - distance] += torch.linspace(-1, 1, 64)
            changed.append(not torch.equal(case.call(case.module, x)[:, 44], before[:, 44]))
    assert changed == [False, True]


@pytest.mark.parametrize(
    ("name", "of_stack", "of_layer"),
    [
        ("wavlm", "layers.0", "attention"),
        ("espnet beats", "layers.0", "self_attn"),
        ("t5", "block.0", "layer.0.SelfAttention"),
    ],
)
def test_a_layer_alone_is_left_alone(name: str, of_stack: str, of_layer: str) -> None:
    layer = make(name).module.get_submodule(of_stack)
    with pytest.warns(UserWarning, match="the stack whose layers share its biases is not at hand"):
        assert not accelerate(layer).accelerated
    assert "the stack whose layers share its biases is not at hand" in explain(layer.get_submodule(of_layer))


def test_beats_of_other_kinds() -> None:
    """Without positions there is nothing to do; without a gate or with other keys: refused."""
    for change, reason in (
        ({"has_relative_attention_bias": False}, "nothing to do: no relative positions"),
        ({"gru_rel_pos": False}, "left alone: its biases have no gate"),
        ({"self_attention": False}, "left alone: no plain self-attention"),
    ):
        layer = copy.deepcopy(make("espnet beats").module)
        for name, value in change.items():
            for block in layer.layers:
                setattr(block.self_attn, name, value)
        with mock.patch("warnings.warn"):
            report = accelerate(layer)
        assert not report.accelerated
        assert reason in str(report)


def test_phi4_is_left_alone() -> None:
    """Its biases come added to its mask, whose values it adds as 0 and 1."""
    m = bare_peers.transformers("phi4_multimodal")
    config = m.Phi4MultimodalAudioConfig(hidden_size=32, num_attention_heads=2)
    with pytest.warns(UserWarning, match="its bias of all pairs comes added to its bool mask"):
        assert not accelerate(m.Phi4MultimodalAudioAttention(config)).accelerated
