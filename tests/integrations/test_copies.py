"""Layers that live elsewhere, or have another source: known by source, tried out, explained."""

import copy
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from implementations import bare_peers
from implementations.peer_cases import answer, make
from txl_kernels.integrations import Accelerated, accelerate, explain, register_copy, registry, source_hash

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def vendored(original: type, folder: Path, change: Callable[[str], str]) -> Any:
    """The module of a class, its source changed, in a package of somebody else's."""
    beside = sys.modules[original.__module__]
    source = change(inspect.getsource(beside)).replace("Path(__file__)", f"Path({beside.__file__!r})")
    (folder / "mine.py").write_text(source)
    name = f"{beside.__package__}.mine"  # for what it imports by relative names
    spec = importlib.util.spec_from_file_location(name, folder / "mine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, original.__name__)


def moved(name: str, folder: Path, change: Callable[[str], str] = lambda s: s) -> tuple[Any, nn.Module]:
    """A case, and its module as one of the copied class."""
    case = make(name)
    case.module.eval()
    other = copy.deepcopy(case.module)
    other.__class__ = vendored(type(case.module), folder, change)
    return case, other


def replacing(old: str, new: str) -> Callable[[str], str]:
    """What writes `new` for `old`, which must be there."""

    def change(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    return change


def reworded(source: str) -> str:
    """Other comments and layout, no other code."""
    return "# A copy.\n" + source.replace('"""', "'''").replace("    # ", "    #  not so: ")


def annotated(source: str) -> str:
    return source.replace("query, key, value, pos_emb, mask)", "query: object, key, value, pos_emb, mask)")


@pytest.mark.parametrize("change", [lambda s: s, reworded, annotated], ids=["moved", "reworded", "annotated"])
def test_a_copy_is_known_by_source(change: Callable[[str], str], tmp_path: Path) -> None:
    case, other = moved("espnet", tmp_path, change)
    before = answer(case)
    case.module = other
    assert "taken for espnet.nets" in explain(other)
    report = accelerate(other, strict=True)
    assert "accelerated, a copy of espnet.nets" in str(report)
    assert "accelerated, as espnet.nets" in str(accelerate(other))
    torch.testing.assert_close(answer(case), before, atol=2e-6, rtol=1e-5)
    fast = answer(case)
    for again in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert isinstance(again, Accelerated)
        case.module = again
        assert torch.equal(answer(case), fast)
    assert not report.fallbacks


def test_the_copies_of_chatterbox_and_of_granite_plus() -> None:
    """Real ones: of CosyVoice's attention with a line changed, of Granite's under another name."""
    module = bare_peers.chatterbox().RelPositionMultiHeadedAttention(4, 64, 0.0)
    assert "a copy of cosyvoice" in str(accelerate(module, strict=True))
    granite, plus = make("granite").module, make("granite plus").module
    assert source_hash(type(granite)) == source_hash(type(plus))


CHANGES: dict[str, tuple[str, str, str]] = {
    "a factor": ("espnet", "(matrix_ac + matrix_bd)", "1.01 * (matrix_ac + matrix_bd)"),
    "the shift": ("espnet", "x_padded[:, :, 1:]", "x_padded[:, :, :-1]"),
    "a bias": ("nemo", "q + self.pos_bias_v", "q + self.pos_bias_u"),
    "the mask": ("nemo", "scores.masked_fill(mask, -INF_VAL)", "scores.masked_fill(mask, -1.0)"),
    "gradients": ("fastspeech2",  "matrix_bd = self.shift_relative_position_tensor(matrix_bd)",
                  "matrix_bd = self.shift_relative_position_tensor(matrix_bd).detach()"),
    "the clamp": ("w2v-bert relative_key", "torch.clamp(distance, -module.left_max_position_embeddings",
                  "torch.clamp(distance, 1 - module.left_max_position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_copy_that_computes_something_else_is_refused(name: str, tmp_path: Path) -> None:
    peer, old, new = CHANGES[name]
    _, other = moved(peer, tmp_path, replacing(old, new))
    with pytest.warns(UserWarning, match=r"but with code of its own; tried out as .* is off by"):
        report = accelerate(other, verify=True)
    assert not report.accelerated
    with pytest.raises(ValueError, match="is off by"):
        accelerate(other, strict=True, verify=True)


HARMLESS: dict[str, tuple[str, str, str]] = {
    "espnet": ("espnet", "(matrix_ac + matrix_bd)", "(matrix_bd + matrix_ac)"),
    "espnet legacy": ("espnet legacy", "(matrix_ac + matrix_bd)", "(matrix_bd + matrix_ac)"),
    "espnet transducer": ("espnet transducer", "math.sqrt(self.d_k)", "self.d_k**0.5"),
    "nemo": ("nemo", "scores = (matrix_ac + matrix_bd) / self.s_d_k", "scores = (matrix_bd + matrix_ac) / self.s_d_k"),
    "nemo local": ("nemo local", "scores = diagonal_matrix_ac / self.s_d_k", "scores = diagonal_matrix_ac * self.s_d_k**-1"),
    "nemo transformer": ("nemo transformer", "score + rel_pos_bias", "1.0 * score + rel_pos_bias"),
    "cosyvoice": ("cosyvoice", "math.sqrt(\n            self.d_k)", "self.d_k**0.5"),
    "fireredasr": ("fireredasr", "matrix_ac + matrix_bd", "matrix_bd + matrix_ac"),
    "fastspeech2": ("fastspeech2", "scores = (matrix_ac + matrix_bd)", "scores = (matrix_bd + matrix_ac)"),
    "speechbrain": ("speechbrain", "matrix_ac + matrix_bd", "matrix_bd + matrix_ac"),
    "enformer": ("enformer", "logits = content_logits + rel_logits", "logits = rel_logits + content_logits"),
    "granite": ("granite", "query_states, rel_pos_emb) * self.scale", "query_states * self.scale, rel_pos_emb)"),
    "granite 5": ("granite 5", "position_bias = queries @ relative", "position_bias = 1.0 * queries @ relative"),
    "gemma": ("gemma", "return term_ac + term_bd_shifted", "return term_bd_shifted + term_ac"),
    "gemma 4": ("gemma 4", "attn_weights = matrix_ac + matrix_bd", "attn_weights = matrix_bd + matrix_ac"),
    "parakeet": ("parakeet", "matrix_bd = matrix_bd * self.scaling", "matrix_bd = self.scaling * matrix_bd"),
    "wav2vec2-conformer": ("wav2vec2-conformer", "attn_output = self.linear_out(attn_output)",
                           "attn_output = self.linear_out(1.0 * attn_output)"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_changed_copy_that_computes_the_same_is_taken(name: str, tmp_path: Path) -> None:
    peer, old, new = HARMLESS[name]
    case, other = moved(peer, tmp_path, replacing(old, new))
    before = answer(case)
    with pytest.warns(UserWarning, match="verify=True tries it out"):
        assert not accelerate(other).accelerated
    weights = {k: v.clone() for k, v in other.state_dict().items()}
    state = torch.get_rng_state()
    report = accelerate(other, strict=True, verify=True, weights="none")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in other.state_dict().items())
    assert ", tried out as " in str(report)
    case.module = other
    torch.testing.assert_close(answer(case), before, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["espnet", "granite", "granite 5", "gemma", "parakeet", "speechbrain"])
def test_layers_are_tried_out_whatever_wraps_them(name: str, tmp_path: Path) -> None:
    """How wide the input is, the wrapped layer says."""
    case, other = moved(name, tmp_path, replacing(*HARMLESS[name][1:]))
    before = answer(case)
    for parent in list(other.modules()):
        for leaf, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, leaf, nn.Sequential(layer))
    accelerate(other, strict=True, verify=True, weights="none")
    case.module = other
    torch.testing.assert_close(answer(case), before, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["espnet", "nemo", "granite", "granite 5", "gemma"])
def test_a_copy_is_tried_out_whatever_tensors_are_made_as(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    peer, old, new = HARMLESS[name]
    _, other = moved(peer, tmp_path, replacing(old, new))
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            accelerate(other, strict=True, verify=True, weights="none")
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_wenets_own_is_not_relative() -> None:
    """It adds encodings of absolute positions without a shift; as in IndexTTS."""
    module = bare_peers.indextts().RelPositionMultiHeadedAttention(4, 64, 0.0)
    report = accelerate(module)
    assert not report.accelerated
    assert "nothing to do: no relative positions: WeNet's own adds encodings of absolute ones" in str(report)
    assert "without a shift" in explain(module)


def test_the_call_of_cosyvoice_without_a_shift_falls_back() -> None:
    module = bare_peers.cosyvoice().RelPositionMultiHeadedAttention(4, 64, 0.0).eval()
    x, encodings = torch.randn(2, 9, 64), torch.randn(1, 9, 64)
    want = module(x, x, x, pos_emb=encodings)[0]
    report = accelerate(module, strict=True)
    assert torch.equal(module(x, x, x, pos_emb=encodings)[0], want)
    assert list(report.fallbacks) == ["encodings of other positions: with as many as keys it adds them without a shift"]


def test_cosyvoice_streams_with_its_cache() -> None:
    """The cache that comes back is the original's, whoever answers."""
    case = make("cosyvoice", held=20)
    module: Any = case.module.eval()
    x, cache, encodings = case.x, torch.randn(3, 4, 20, 32), torch.randn(1, 129, 64)
    with torch.no_grad():
        want = module(x, x, x, pos_emb=encodings, cache=cache)
        accelerate(module, strict=True)
        got = module(x, x, x, pos_emb=encodings, cache=cache)
    torch.testing.assert_close(got[0], want[0], atol=2e-6, rtol=1e-5)
    assert torch.equal(got[1], want[1])


def test_explain(tmp_path: Path) -> None:
    case, other = moved("espnet", tmp_path, lambda s: s.replace("matrix_ac + matrix_bd", "matrix_bd + matrix_ac"))
    said = explain(other)
    assert "mine.RelPositionMultiHeadedAttention: like espnet.nets" in said
    assert "-        scores = (matrix_ac + matrix_bd) / math.sqrt(" in said
    assert "+        scores = (matrix_bd + matrix_ac) / math.sqrt(" in said
    assert "register_copy(RelPositionMultiHeadedAttention, of='ESPnetRelPosition')" in said
    assert "by name and source" in explain(case.module)
    accelerate(case.module)
    assert "accelerated by the adapter of espnet" in explain(case.module)
    assert "like no attention that is known" in explain(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got int"):
        explain(3)  # type: ignore[arg-type]


def test_a_copy_registered_in_three_lines(tmp_path: Path) -> None:
    case, other = moved("espnet", tmp_path, lambda s: s.replace("math.sqrt(self.d_k)", "self.d_k**0.5"))
    before, known = answer(case), dict(registry._peers)
    try:
        register_copy(type(other), of="ESPnetRelPosition")
        assert len(accelerate(other, strict=True).accelerated) == 1
        case.module = pickle.loads(pickle.dumps(other))
        torch.testing.assert_close(answer(case), before, atol=2e-6, rtol=1e-5)
        with pytest.raises(ValueError, match=r"of must be one of Wav2Vec2Conformer, .* got 'ESPnet'"):
            register_copy(type(other), of="ESPnet")
        with pytest.raises(TypeError, match=r"kind must be a subclass of torch\.nn\.Module"):
            register_copy(other, of="ESPnetRelPosition")  # type: ignore[arg-type]
    finally:
        registry._peers.clear()
        registry._peers.update(known)


def test_plain_attention_is_not_taken_for_relative() -> None:
    """The base classes have the same arguments."""
    for module in (
        bare_peers.cosyvoice().MultiHeadedAttention(4, 64, 0.0),
        bare_peers.nemo().MultiHeadAttention(4, 64, 0.0),
    ):
        assert "like no attention that is known" in explain(module)
