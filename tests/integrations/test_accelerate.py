"""Modules that `accelerate` selects, refuses, and leaves as they were."""

import copy
import inspect
import io
import pickle
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import ALL, ALONE, case_of, check
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import MAKERS, Sizes, answer, make
from txl_kernels import integrations
from txl_kernels.integrations import (
    Accelerated,
    Peer,
    Report,
    accelerate,
    explain,
    is_accelerated,
    peers,
    registry,
    restore,
)
from txl_kernels.integrations.adapters.inkling import TextModel

ESPNET = "espnet.nets.pytorch_backend.transformer.attention.RelPositionMultiHeadedAttention"


@pytest.mark.parametrize("name", ALL)
def test_all_but_classes_is_unchanged(name: str) -> None:
    """State, hooks, copies and pickles, before and after `restore`."""
    case = case_of(name)
    model, before = case.module, answer(case)
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    called: list[str] = []
    hook = model.register_forward_pre_hook(lambda *args: called.append("hook"))
    report = accelerate(model, strict=True)
    changed = [type(m) is not kind for m, kind in zip(model.modules(), kinds, strict=True)]
    assert sum(changed) == len(report.accelerated) > 0
    assert f"{sum(changed)} of {sum(changed)} accelerated" in str(report)
    assert all(isinstance(m, kind) for m, kind in zip(model.modules(), kinds, strict=True))
    assert list(model.state_dict()) == keys
    fast = answer(case)
    assert called == ["hook"]
    hook.remove()
    scale = max(1.0, float(before.abs().max()))
    torch.testing.assert_close(fast[case.valid], before[case.valid], atol=2e-5 * scale, rtol=1e-4)
    assert len(accelerate(model).accelerated) == sum(changed)
    copies = [copy.deepcopy(model)]
    if name != "wavlm":  # torch does not pickle its parametrized convolution
        copies.append(pickle.loads(pickle.dumps(model)))
    for copied in copies:
        case.module = copied
        assert is_accelerated(copied)
        assert torch.equal(answer(case), fast)
    case.module = model
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved, weights_only=True))
    assert restore(model) == sum(changed)
    assert [type(m) for m in model.modules()] == kinds
    assert not any("_txl_kernels" in vars(m) for m in model.modules())
    assert torch.equal(answer(case), before)


def test_replicas() -> None:
    """torch.nn.DataParallel makes a new object with the old one's __dict__."""
    case = case_of("espnet")
    accelerate(case.module, strict=True)
    before = answer(case)
    case.module = case.module._replicate_for_data_parallel()
    for name, p in case_of("espnet").module.named_parameters(recurse=False):
        setattr(case.module, name, p.detach())
    assert isinstance(case.module, Accelerated)
    assert torch.equal(answer(case), before)


Maker = Callable[[pytest.MonkeyPatch], nn.Module]


def new(folder: str, kind: str, config: str, **options: Any) -> Maker:
    """Return a maker of an attention module of transformers."""

    def maker(m: pytest.MonkeyPatch) -> nn.Module:
        modeling = bare_peers.transformers(folder)
        module: nn.Module = getattr(modeling, kind)(getattr(modeling, config)(**options))
        return module

    return maker


def changed(name: str, where: str = "", **attributes: Any) -> Maker:
    """Return a maker of a case's module, or of a part of it, with other attributes; None deletes
    one."""

    def maker(m: pytest.MonkeyPatch) -> nn.Module:
        module = make(name).module.get_submodule(where)
        for attribute, value in attributes.items():
            delattr(module, attribute) if value is None else setattr(module, attribute, value)
        return module

    return maker


def subclass(m: pytest.MonkeyPatch) -> nn.Module:
    module = make("espnet").module
    module.__class__ = type("Own", (type(module),), {})
    return module


def replaced(name: str, method: str, on_class: bool = False) -> Maker:
    """Return a maker of a module whose method was replaced, on the instance or on its class."""

    def maker(m: pytest.MonkeyPatch) -> nn.Module:
        module = make(name).module
        own = getattr(type(module), method)
        new = lambda *given, **named: own(*given, **named)  # noqa: E731
        m.setattr(type(module) if on_class else module, method, new)
        return module

    return maker


def unknown_source(m: pytest.MonkeyPatch) -> nn.Module:
    known = registry.find(ESPNET)
    assert known is not None
    m.setattr(registry, "_peers", dict(registry._peers))
    integrations.register(Peer(known.name, ESPNET, known.adapter, known.distribution, {"202511": "0123456789abcdef"}))
    return make("espnet").module


def other_helper(name: str, helper: str) -> Maker:
    """Return a maker of a module whose code names a function of another release."""

    def maker(m: pytest.MonkeyPatch) -> nn.Module:
        module = make(name).module
        other = types.FunctionType(other_helper.__code__, {})
        other.__module__ = type(module).__module__
        m.setattr(sys.modules[other.__module__], helper, other)
        return module

    return maker


REPLACED = (("nemo", "forward"), ("nemo", "rel_shift"), ("espnet", "forward"), ("espnet", "forward_attention"))
NO_STACK = "the stack whose layers share its biases is not at hand"
BEATS = ("espnet beats", "layers.0.self_attn")
LEFT_ALONE: dict[str, tuple[Maker, str]] = {
    "rotary positions": (new("wav2vec2_bert", "Wav2Vec2BertSelfAttention", "Wav2Vec2BertConfig", num_attention_heads=4,
                             hidden_size=64, position_embeddings_type="rotary"), "position_embeddings_type is 'rotary'"),
    "missing attribute": (changed("wav2vec2-conformer", position_embeddings_type=None),
                          "is not complete: .*position_embeddings_type"),
    "lazy layer": (changed("espnet", linear_q=nn.LazyLinear(64)), "has parameters that are not initialised"),
    "subclass": (subclass, "a subclass of espnet.*RelPositionMultiHeadedAttention, whose own code is unknown"),
    "forward of the instance": (replaced("espnet", "forward"), "its forward was replaced on the instance"),
    "method of the instance": (replaced("nemo", "rel_shift"), "its rel_shift was replaced on the instance"),
    **{f"{name}'s class, {method}": (replaced(name, method, True), f".*{method} is not that of its source: it was replaced")
       for name, method in REPLACED},
    "float64": (lambda m: make("nemo").module.double(), "no kernel for torch.float64 on cpu"),
    "other release": (unknown_source, r"source unknown \(espnet 202511, hash [0-9a-f]{16}\); tested: espnet 202511"),
    **{f"other {helper}": (other_helper(name, helper), "source unknown") for name, helper in
       (("nemotron", "eager_attention_forward"), ("rllib", "RelativePositionEmbedding"))},
    "LongT5's global attention": (new("longt5", "LongT5TransientGlobalAttention", "LongT5Config", d_model=32, num_heads=4),
                                  "transient global attention: every query also sees the means of blocks"),
    "Phi-4": (new("phi4_multimodal", "Phi4MultimodalAudioAttention", "Phi4MultimodalAudioConfig", hidden_size=32,
                  num_attention_heads=2), "its bias of all pairs comes added to its bool mask"),
    "WavLM without its stack": (changed("wavlm", "layers.0.attention"), NO_STACK),
    "BEATs without its stack": (changed(*BEATS), NO_STACK),
    "T5 without its stack": (changed("t5", "block.0.layer.0.SelfAttention"), NO_STACK),
    "BEATs without a gate": (changed(*BEATS, gru_rel_pos=False), "its biases have no gate"),
    "BEATs with other keys": (changed(*BEATS, self_attention=False), "no plain self-attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_with_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, reason = LEFT_ALONE[name]
    module = maker(monkeypatch)
    kind = type(module)
    model = nn.ModuleDict({"attention": module, "other": nn.Linear(2, 2)})
    verify = False if reason.startswith("source unknown") else None  # else a trial takes it
    with pytest.warns(UserWarning, match=f"txl_kernels left attention .* alone: {reason}"):
        report = accelerate(model, verify=verify)
    assert type(module) is kind
    assert [row.name for row in report.left_alone] == ["attention"]
    assert "left alone" in str(report)
    with pytest.raises(ValueError, match=f"(?s)strict=True.*attention.*{reason}"):
        accelerate(model, strict=True, verify=verify)
    assert re.search(reason, explain(module))


def test_one_warning_for_modules_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([replaced("espnet", "forward")(monkeypatch) for _ in range(3)])
    with pytest.warns(UserWarning, match="txl_kernels left") as warned:
        accelerate(model)
    (message,) = (str(x.message) for x in warned)
    assert message.startswith("txl_kernels left 0 and 2 more (espnet.")


def without_positions(m: pytest.MonkeyPatch) -> nn.Module:
    modeling = bare_peers.nemo_transformer()
    config = modeling.TransformerEncoderConfig(d_model=64, n_heads=4, self_attention_model="abs_pos")
    module: nn.Module = modeling.MultiHeadAttention(config)
    return module


NOTHING_TO_DO: dict[str, tuple[Maker, str]] = {
    "NeMo's absolute positions": (without_positions, "no relative positions"),
    "BEATs without positions": (changed(*BEATS, has_relative_attention_bias=False), "no relative positions"),
    "IndexTTS": (lambda m: bare_peers.indextts().RelPositionMultiHeadedAttention(4, 64, 0.0),
                 "no relative positions: WeNet's own adds encodings of absolute ones, without a shift"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING_TO_DO)
def test_no_relative_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, reason = NOTHING_TO_DO[name]
    module = maker(monkeypatch)
    report = accelerate(module)
    assert not report.accelerated
    assert f"nothing to do: {reason}" in str(report)
    assert reason in explain(module)
    with pytest.raises(ValueError, match="strict=True"):
        accelerate(module, strict=True)


def test_strict_names_all_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([make("espnet").module, replaced("espnet", "forward")(monkeypatch), subclass(monkeypatch)])
    kinds = [type(m) for m in model]
    with pytest.raises(ValueError, match=r"(?s)1 .*forward was replaced.*2 .*a subclass of"):
        accelerate(model, strict=True)
    assert [type(m) for m in model] == kinds


def test_nothing_to_accelerate() -> None:
    """The report names each class of attention once."""
    with pytest.warns(UserWarning, match="nothing to accelerate: the model has no attention module"):
        assert accelerate(nn.Linear(2, 2)) == Report(())
    assert restore(nn.Linear(2, 2)) == 0
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
    model = nn.ModuleDict({"encoder": encoder, "plain": bare_peers.nemo().MultiHeadAttention(4, 64, 0.0)})
    with pytest.warns(UserWarning, match="nothing to accelerate: the model has no attention module that") as warned:
        report = accelerate(model)
    assert str(warned[0].message) == f"txl_kernels: {str(report).splitlines()[0]}"
    assert str(report).splitlines()[1:] == [
        "  encoder.layers.0.self_attn and 2 more (torch.nn.modules.activation.MultiheadAttention)",
        "  plain (nemo.collections.asr.parts.submodules.multi_head_attention.MultiHeadAttention)",
    ]
    with pytest.raises(ValueError, match=r"(?s)strict=True.*nothing to acc.*encoder\.layers\.0\.self_attn and 2 more"):
        accelerate(model, strict=True)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weights": "some"}, ValueError, "weights must be 'fallback' or 'none', got 'some'"),
    ({"streaming": 1}, TypeError, "streaming must be True or False, got int"),
    ({"window": 8}, TypeError, r"window must be None or a pair \(left, right\), got 8"),
    ({"window": (1, 2, 3)}, ValueError, r"window must be an integer or a pair \(left, right\), got 3 values"),
    ({"include": "encodr"}, ValueError, "include must hold classes and names of the model's modules, got 'encodr'"),
    ({"exclude": [nn.Conv1d]}, ValueError, "exclude must hold .* got 'Conv1d', which fits none"),
    ({"exclude": 3}, TypeError, "exclude must be None, a class, a name or several of them, got 3"),
    ({"include": [3]}, TypeError, "include must hold classes and names, got 3"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=str)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    module = make("espnet").module
    with pytest.raises(error, match=message):
        accelerate(module, **options)
    assert not is_accelerated(module)


@pytest.mark.parametrize("function", [accelerate, is_accelerated, restore, explain])
def test_argument_must_be_a_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"(model|module) must be a torch\.nn\.Module, got str"):
        function("a model")


class Scale(nn.Module):
    """A user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class FastScale(Accelerated):
    def forward(self: Any, x: Tensor) -> Tensor | str:
        return "too large" if x.numel() > 3 else x * self.scale + 0.0


def test_register_a_class(registered: None) -> None:
    path = f"{Scale.__module__}.Scale"
    integrations.register(Peer("ScaleOfTests", path, FastScale, "mine"))
    module = Scale()
    report = accelerate(module, strict=True)
    assert isinstance(module, FastScale)
    assert module(torch.ones(2)).tolist() == [1, 1]
    assert module(x=torch.ones(4)).tolist() == [1, 1, 1, 1]
    assert report.fallbacks == {"too large": 1}
    with pytest.raises(ValueError, match=r"window must be None for .*Scale, got \(2, 0\): its adapter would ignore it"):
        accelerate(module, window=(2, 0))
    module.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="its forward was replaced on the instance"):
        assert not accelerate(module).accelerated
    del module.forward
    restore(module)
    with pytest.raises(ValueError, match="window must be None for"):
        accelerate(module, window=(2, 0))
    assert type(module) is Scale
    with pytest.raises(ValueError, match=r"peer\.name must be another than that of"):
        integrations.register(Peer("ScaleOfTests", "elsewhere.Scale", FastScale, "mine"))
    with pytest.raises(ValueError, match="must be a Python identifier, got 'no name'"):
        integrations.register(Peer("no name", path, FastScale, "mine"))
    with pytest.raises(TypeError, match="must be a subclass of Accelerated"):
        integrations.register(Peer("Other", path, Scale, "mine"))


def test_every_peer_has_a_case() -> None:
    known = {peer.path for peer in peers()}
    found = {name: {registry.path_of(type(m)) for m in make(name).module.modules()} & known for name in MAKERS}
    assert all(found.values())
    elsewhere = {path for path in known if ".inkling" in path or path.startswith("x_transformers.")}
    elsewhere |= {  # LEFT_ALONE, NOTHING_TO_DO
        "indextts.gpt.conformer.attention.RelPositionMultiHeadedAttention",
        "transformers.models.longt5.modeling_longt5.LongT5TransientGlobalAttention",
        "transformers.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioAttention",
    }
    assert set().union(elsewhere, *found.values()) == known


def test_adapters_have_the_originals_parameters() -> None:
    for peer in peers():
        if peer.adapter is Accelerated or issubclass(peer.adapter, TextModel):  # no method, or one that passes on all
            continue
        method = peer.adapter.method
        theirs = list(inspect.signature(getattr(bare_peers.original(peer), method)).parameters)
        ours = list(inspect.signature(getattr(peer.adapter, method)).parameters)
        # Parameters of other classes, or of older releases, that share the adapter.
        more = {"relative_position_embeddings", "past_key_values", "cache"} - set(theirs)
        assert [name for name in ours if name not in more] == theirs, peer.name


def test_mask_is_scanned_once() -> None:
    """Layers share a mask, and its bounds until it changes in place."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    first = integrations.mask_bounds(mask)
    assert integrations.mask_bounds(mask) is first
    mask[0, 4] = False
    assert integrations.mask_bounds(mask)[1].tolist() == [[4], [5]]


@pytest.mark.parametrize("name", ["parakeet", "nemo", "espnet", "xlnet", "w2v-bert relative_key", "gemma 4", "t5",
                                  "longt5 local", "mpnet", "speechbrain beats", "zipformer"])  # fmt: skip
def test_one_frame(name: str) -> None:
    case = case_of(name, "none", sizes=Sizes(T=1, B=1))
    check(case.module, lambda: answer(case), tolerance=2e-5)


@pytest.mark.parametrize("name", ALONE)
def test_inference_mode_and_training_after_it(name: str) -> None:
    """A mask made in inference mode is used for training, and inference tensors have no
    versions."""
    case = case_of(name)
    before = answer(case)
    accelerate(case.module, strict=True, streaming=True)
    with torch.inference_mode():
        inside = case.call(case.module, case.x)
        fresh = case_of(name)  # its masks are inference tensors
        assert torch.equal(fresh.call(case.module, fresh.x), inside)
    torch.testing.assert_close(inside[case.valid], before[case.valid], atol=2e-5, rtol=1e-4)
    case.call(case.module, case.x.requires_grad_()).square().sum().backward()


DROPPING = ("espnet", "espnet legacy", "espnet transducer", "fastspeech2", "speechbrain", "nemo", "cosyvoice", "enformer",
            "nemo local")  # fmt: skip


@pytest.mark.parametrize("dropping", [True, False])
@pytest.mark.parametrize("name", DROPPING)
def test_mode_of_dropout_modules(name: str, dropping: bool) -> None:
    """Monte Carlo dropout: the dropout modules' mode decides, not the attention's."""
    case = make(name, dropout=0.5)
    case.module.train(not dropping)
    for part in case.module.modules():
        if isinstance(part, nn.Dropout):
            part.train(dropping)
    assert torch.equal(answer(case), answer(case)) != dropping
    accelerate(case.module, strict=True)
    assert torch.equal(answer(case), answer(case)) != dropping


def test_restore_after_other_changes() -> None:
    module: Any = make("espnet").module
    accelerate(module, strict=True)
    model = nn.ModuleDict({"attention": module})
    torch.nn.utils.parametrize.register_parametrization(module, "pos_bias_u", nn.Identity())
    with pytest.raises(RuntimeError, match=r"attention is now a .*: undo what changed its class"):
        restore(model)
    torch.nn.utils.parametrize.remove_parametrizations(module, "pos_bias_u")
    inner = module.forward
    module.forward = lambda *args: inner(*args)
    with pytest.raises(RuntimeError, match="attention has a forward of the instance's, replaced since"):
        restore(model)
    del module.forward
    assert restore(model) == 1


class Encoder(nn.Module):
    """Two layers, each with an attention of ESPnet's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": make("espnet").module}) for _ in range(2))


def encoder_and_decoder() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": Encoder(), "decoder": nn.ModuleList([make("nemo").module])})


NAMES = {"encoder.layers.0.attention", "encoder.layers.1.attention", "decoder.0"}
SELECTIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, NAMES),
    ({"include": "encoder"}, NAMES - {"decoder.0"}),
    ({"include": Encoder}, NAMES - {"decoder.0"}),
    ({"include": "Encoder"}, NAMES - {"decoder.0"}),
    ({"exclude": "encoder.layers.0"}, NAMES - {"encoder.layers.0.attention"}),
    ({"exclude": ["*.1.attention", "decoder"]}, {"encoder.layers.0.attention"}),
    ({"include": ["RelPositionMultiHeadAttention", "encoder.layers.0*"], "exclude": "decoder"},
     {"encoder.layers.0.attention"}),
    ({"exclude": nn.Module}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("options", "selected"), SELECTIONS, ids=range(len(SELECTIONS)))
def test_include_and_exclude(options: dict[str, Any], selected: set[str]) -> None:
    model = encoder_and_decoder()
    assert {row.name for row in accelerate(model, **options).accelerated} == selected
    assert is_accelerated(model) == bool(selected)


def test_unselected_modules_are_reported_and_unchanged() -> None:
    model = encoder_and_decoder()
    accelerate(model, include="decoder", window=(4, 4))
    report = accelerate(model, exclude="decoder", strict=True)
    assert "nothing to do: excluded" not in str(report)  # it is accelerated already
    assert model["decoder"][0].setting("window") == (4, 4)
    assert str(report) == str(accelerate(model, exclude="decoder", strict=True))
    assert restore(model) == 3
    assert "nothing to do: not included" in str(accelerate(model, include="encoder"))
