"""What `accelerate` leaves as it was, what it refuses, and what it counts."""

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import MAKERS, STACKS, Sizes, answer, make
from txl_kernels import integrations
from txl_kernels.integrations import (
    Accelerated,
    Peer,
    Report,
    accelerate,
    is_accelerated,
    peers,
    registry,
    restore,
    source_hash,
)
from txl_kernels.integrations.adapters.inkling import TextModel

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
EVERY = tuple(name for name in MAKERS if name not in STACKS)  # stacks: test_t5.py, test_shared_bias.py


@pytest.mark.parametrize("name", EVERY)
def test_everything_else_stays(name: str) -> None:
    case = make(name)
    case.module.eval()
    kind, before, keys = type(case.module), answer(case), list(case.module.state_dict())
    seen: list[str] = []
    case.module.register_forward_pre_hook(lambda *args: seen.append("hook"))
    report = accelerate(case.module, strict=True)
    assert "1 of 1 accelerated" in str(report)
    assert type(case.module) is not kind
    assert isinstance(case.module, kind)
    assert list(case.module.state_dict()) == keys
    fast = answer(case)
    assert seen == ["hook"]
    torch.testing.assert_close(fast, before, atol=2e-5, rtol=1e-4)
    # Twice is once.
    assert len(accelerate(case.module).accelerated) == 1
    original, again = case.module, io.BytesIO()
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(_without_hooks(original)))):
        case.module = copied
        assert isinstance(copied, Accelerated)
        assert torch.equal(answer(case), fast)
    case.module = original
    torch.save(case.module.state_dict(), again)
    again.seek(0)
    case.module.load_state_dict(torch.load(again, weights_only=True))
    assert restore(case.module) == 1
    assert type(case.module) is kind
    assert "_txl_kernels" not in vars(case.module)
    assert torch.equal(answer(case), before)


def _without_hooks(module: nn.Module) -> nn.Module:
    """A copy: functions of tests do not pickle."""
    copied = copy.deepcopy(module)
    copied._forward_pre_hooks.clear()
    return copied


def test_replicas() -> None:
    """As torch.nn.DataParallel makes them: a new object with the old one's __dict__."""
    case = make("espnet", "right")
    case.module.eval()
    accelerate(case.module, strict=True)
    before = answer(case)
    case.module = case.module._replicate_for_data_parallel()
    for name, p in make("espnet", "right").module.named_parameters(recurse=False):
        setattr(case.module, name, p.detach())
    assert isinstance(case.module, Accelerated)
    assert torch.equal(answer(case), before)


def _rotary() -> nn.Module:
    m = bare_peers.transformers("wav2vec2_bert")
    config = m.Wav2Vec2BertConfig(hidden_size=64, num_attention_heads=4, position_embeddings_type="rotary")
    module: nn.Module = m.Wav2Vec2BertSelfAttention(config)
    return module


def _half_initialised() -> nn.Module:
    module = make("wav2vec2-conformer").module
    del module.position_embeddings_type
    return module


def _subclass() -> nn.Module:
    module = make("espnet").module
    module.__class__ = type("Own", (type(module),), {})
    return module


def _own_forward() -> nn.Module:
    module = make("espnet").module
    own = module.forward
    module.forward = lambda *given: own(*given)  # type: ignore[method-assign]
    return module


def _simplified() -> nn.Module:
    module: nn.Module = bare_peers.espnet_transducer().RelPositionMultiHeadedAttention(4, 64, 0.0, True)
    return module


def _uninitialised() -> nn.Module:
    module = make("espnet").module
    module.linear_q = nn.LazyLinear(64)
    return module


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rotary": (_rotary, "position_embeddings_type is 'rotary'"),
    "simplified": (_simplified, "simplified_attention_score"),
    "half initialised": (_half_initialised, "is not complete: .*position_embeddings_type"),
    "lazy": (_uninitialised, "has parameters that are not initialised"),
    "subclass": (_subclass, "a subclass of espnet.*RelPositionMultiHeadedAttention, whose own code is unknown"),
    "own forward": (_own_forward, "its forward was replaced on the instance"),
    "float64": (lambda: make("nemo").module.double(), "no kernel for torch.float64 on cpu"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone_loudly(name: str) -> None:
    maker, reason = LEFT_ALONE[name]
    module = maker()
    kind = type(module)
    model = nn.ModuleDict({"attention": module, "other": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match=f"txl_kernels left attention .* alone: {reason}"):
        report = accelerate(model)
    assert type(module) is kind
    assert [row.name for row in report.left_alone] == ["attention"]
    assert "left alone" in str(report)
    with pytest.raises(ValueError, match=f"(?s)strict=True.*attention.*{reason}"):
        accelerate(model, strict=True)


def test_strict_names_all_and_changes_nothing() -> None:
    model = nn.ModuleList([make("espnet").module, _own_forward(), _subclass()])
    kinds = [type(m) for m in model]
    with pytest.raises(ValueError, match=r"(?s)1 .*forward was replaced.*2 .*a subclass of"):
        accelerate(model, strict=True)
    assert [type(m) for m in model] == kinds


def test_an_unknown_source_is_left_alone() -> None:
    case = make("espnet")
    known = registry.find(registry.path_of(type(case.module)))
    other = Peer(known.name, known.path, known.adapter, known.distribution, {"202511": "0123456789abcdef"})
    integrations.register(other)
    try:
        with pytest.warns(
            UserWarning, match=r"source unknown \(espnet 202511, hash [0-9a-f]{16}\); tested: espnet 202511"
        ):
            accelerate(case.module)
    finally:
        integrations.register(known)
    assert len(accelerate(case.module).accelerated) == 1


@pytest.mark.parametrize(
    ("name", "helper"),
    [
        ("nemotron", "eager_attention_forward"),
        ("rllib", "RelativePositionEmbedding"),
    ],
)
def test_the_hash_is_of_helpers_too(name: str, helper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(name).module
    before = source_hash(type(module))

    def other(*args: Any) -> None:
        """Of another release."""

    other.__module__ = type(module).__module__
    monkeypatch.setattr(sys.modules[type(module).__module__], helper, other)
    assert source_hash(type(module)) != before
    with pytest.warns(UserWarning, match="source unknown"):
        assert not accelerate(module).accelerated


def test_nothing_to_accelerate() -> None:
    with pytest.warns(UserWarning, match="nothing to accelerate: the model has no attention module"):
        report = accelerate(nn.Linear(2, 2))
    assert report == Report(())
    with pytest.raises(ValueError, match="nothing to accelerate"):
        accelerate(nn.Linear(2, 2), strict=True)
    assert restore(nn.Linear(2, 2)) == 0


def test_nothing_to_accelerate_names_what_there_is() -> None:
    """Each class of attention once."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
    plain = bare_peers.nemo().MultiHeadAttention(4, 64, 0.0)
    model = nn.ModuleDict({"encoder": encoder, "plain": plain})
    with pytest.warns(UserWarning, match="nothing to accelerate: the model has no attention module that") as warned:
        report = accelerate(model)
    assert str(report) in str(warned[0].message)
    assert str(report).splitlines()[1:] == [
        "  encoder.layers.0.self_attn and 2 more (torch.nn.modules.activation.MultiheadAttention)",
        "  plain (nemo.collections.asr.parts.submodules.multi_head_attention.MultiHeadAttention)",
    ]
    with pytest.raises(ValueError, match=r"(?s)strict=True.*encoder\.layers\.0\.self_attn and 2 more"):
        accelerate(model, strict=True)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weights": "some"}, ValueError, "weights must be 'fallback' or 'none', got 'some'"),
    ({"streaming": 1}, TypeError, "streaming must be True or False, got int"),
    ({"window": 8}, TypeError, r"window must be None or a pair \(left, right\), got 8"),
    ({"window": (1, 2, 3)}, ValueError, r"window must be an integer or a pair \(left, right\), got 3 values"),
    ({"include": "encodr"}, ValueError, "include must hold classes and names of the model's modules, got 'encodr'"),
    ({"exclude": [nn.Conv1d]}, ValueError, "exclude must hold .* got 'Conv1d', which fits none"),
    ({"exclude": 3}, TypeError, "exclude must be None, a class, a name or several of them, got 3"),
    ({"include": [3]}, TypeError, "include must hold classes and names, got 3"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=str)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    module = make("espnet").module
    with pytest.raises(error, match=message):
        accelerate(module, **options)
    assert not is_accelerated(module)


@pytest.mark.parametrize("function", [accelerate, is_accelerated, restore])
def test_modules_are_taken_alone(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        function("a model")


class Mine(nn.Module):
    """An attention class of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class MineFaster(Accelerated):
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * self.scale + 0.0


def test_register_ones_own() -> None:
    path = f"{Mine.__module__}.Mine"
    before = dict(registry._peers)
    try:
        integrations.register(Peer("MineOfTests", path, MineFaster, "mine"))
        module = Mine()
        assert len(accelerate(module, strict=True).accelerated) == 1
        assert isinstance(module, MineFaster)
        with pytest.raises(ValueError, match=r"peer\.name must be another than that of"):
            integrations.register(Peer("MineOfTests", "elsewhere.Mine", MineFaster, "mine"))
        with pytest.raises(ValueError, match="must be a Python identifier, got 'no name'"):
            integrations.register(Peer("no name", path, MineFaster, "mine"))
        with pytest.raises(TypeError, match="must be a subclass of Accelerated"):
            integrations.register(Peer("Other", path, Mine, "mine"))
    finally:
        registry._peers.clear()
        registry._peers.update(before)


def test_every_peer_has_a_case() -> None:
    known = {peer.path for peer in peers()}
    found = {name: {registry.path_of(type(m)) for m in make(name).module.modules()} & known for name in MAKERS}
    assert all(found.values())
    elsewhere = {  # refused: test_copies.py, test_t5.py, test_shared_bias.py
        "indextts.gpt.conformer.attention.RelPositionMultiHeadedAttention",
        "transformers.models.longt5.modeling_longt5.LongT5TransientGlobalAttention",
        "transformers.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioAttention",
    }
    elsewhere |= {path for path in known if ".inkling" in path}  # test_inkling.py
    assert set().union(elsewhere, *found.values()) == known


def test_forward_takes_what_the_original_takes() -> None:
    """Every argument of the original's, by the same name and in the same order."""
    for peer in peers():
        if issubclass(peer.adapter, TextModel):  # it takes and passes on all
            continue
        method = peer.adapter.method
        if peer.adapter is Accelerated:  # no adapter, but a reason
            continue
        theirs = list(inspect.signature(getattr(bare_peers.original(peer), method)).parameters)
        ours = list(inspect.signature(getattr(peer.adapter, method)).parameters)
        # Of the others, or of older releases, that share the adapter.
        more = {"relative_position_embeddings", "past_key_values", "cache"} - set(theirs)
        assert [name for name in ours if name not in more] == theirs, peer.name


def test_masks_are_scanned_once_a_forward() -> None:
    """Layers share a mask; a mask changed in place is another."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    first = integrations.mask_bounds(mask)
    assert integrations.mask_bounds(mask) is first
    mask[0, 4] = False
    assert integrations.mask_bounds(mask)[1].tolist() == [[4], [5]]


def test_small_sizes() -> None:
    names = ("parakeet", "nemo", "espnet", "xlnet", "w2v-bert relative_key", "gemma 4", "t5", "longt5 local", "mpnet",
             "speechbrain beats")  # fmt: skip
    for name in names:
        case = make(name, "none", sizes=Sizes(T=1, B=1))
        case.module.eval()
        before = answer(case)
        accelerate(case.module, strict=True)
        torch.testing.assert_close(answer(case), before, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_inference_mode_and_training_after_it(name: str) -> None:
    """A mask of inference is used for training, and inference tensors tell no versions."""
    masks = "none" if name in ("ding", "rllib", "nemo transformer") else "right"
    case = make(name, masks)
    case.module.eval()
    before = answer(case)
    accelerate(case.module, strict=True, streaming=True)
    with torch.inference_mode():
        inside = case.call(case.module, case.x)
        fresh = make(name, masks)  # whose masks are inference tensors
        fresh.module = case.module
        assert torch.equal(fresh.call(case.module, fresh.x), inside)
    torch.testing.assert_close(inside[case.valid], before[case.valid], atol=2e-5, rtol=1e-4)
    case.call(case.module, case.x.requires_grad_()).square().sum().backward()


DROPPING = ("espnet", "espnet legacy", "espnet transducer", "fastspeech2", "speechbrain", "nemo", "cosyvoice", "enformer",
            "nemo local")  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_modules_decide_for_themselves(name: str) -> None:
    """Monte Carlo dropout: a model in evaluation whose dropout goes on; and the other way round."""
    for dropping in (True, False):
        case = make(name, dropout=0.5)
        case.module.train(not dropping)
        for part in case.module.modules():
            if isinstance(part, nn.Dropout):
                part.train(dropping)
        assert torch.equal(answer(case), answer(case)) != dropping
        accelerate(case.module, strict=True)
        assert torch.equal(answer(case), answer(case)) != dropping


def test_restore_refuses_a_class_changed_since() -> None:
    module = make("espnet").module
    accelerate(module, strict=True)
    torch.nn.utils.parametrize.register_parametrization(module, "pos_bias_u", nn.Identity())
    model = nn.ModuleDict({"attention": module})
    with pytest.raises(RuntimeError, match=r"attention is now a .*: undo what changed its class"):
        restore(model)
    torch.nn.utils.parametrize.remove_parametrizations(module, "pos_bias_u")
    assert restore(model) == 1
