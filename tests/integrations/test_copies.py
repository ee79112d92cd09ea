"""Copies of known layers in other packages, and layers of other source: recognised by source,
verified, explained."""

import copy
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import case_of, vendored
from torch import nn

from implementations import bare_peers
from implementations.peer_cases import answer
from txl_kernels.integrations import Accelerated, accelerate, explain, register_copy, restore, source_hash


def moved(name: str, folder: Path, change: Callable[[str], str] = lambda s: s) -> tuple[Any, nn.Module]:
    """Return a case, and its module with the copied class."""
    case = case_of(name, "none")
    other = copy.deepcopy(case.module)
    other.__class__ = vendored(type(case.module), folder, change)
    return case, other


def replacing(old: str, new: str) -> Callable[[str], str]:
    """Return a function that replaces `old`, which must occur, by `new`."""

    def change(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    return change


def reworded(source: str) -> str:
    """Change comments and layout alone."""
    return "# A copy.\n" + source.replace('"""', "'''").replace("    # ", "    #  not so: ")


def annotated(source: str) -> str:
    return source.replace("query, key, value, pos_emb, mask)", "query: object, key, value, pos_emb, mask)")


@pytest.mark.parametrize("change", [lambda s: s, reworded, annotated], ids=["moved", "reworded", "annotated"])
def test_copy_is_recognised_by_source(change: Callable[[str], str], tmp_path: Path) -> None:
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


def test_copies_in_chatterbox_and_granite_plus() -> None:
    """CosyVoice's attention with a line changed, and Granite's under another name."""
    module = bare_peers.chatterbox().RelPositionMultiHeadedAttention(4, 64, 0.0)
    assert "a copy of cosyvoice" in str(accelerate(module, strict=True))
    granite, plus = case_of("granite").module, case_of("granite plus").module
    assert source_hash(type(granite)) == source_hash(type(plus))


CHANGES: dict[str, tuple[str, str, str]] = {
    "factor": ("espnet", "(matrix_ac + matrix_bd)", "1.01 * (matrix_ac + matrix_bd)"),
    "shift": ("espnet", "x_padded[:, :, 1:]", "x_padded[:, :, :-1]"),
    "bias": ("nemo", "q + self.pos_bias_v", "q + self.pos_bias_u"),
    "mask": ("nemo", "scores.masked_fill(mask, -INF_VAL)", "scores.masked_fill(mask, -1.0)"),
    "gradients": ("fastspeech2",  "matrix_bd = self.shift_relative_position_tensor(matrix_bd)",
                  "matrix_bd = self.shift_relative_position_tensor(matrix_bd).detach()"),
    "clamp": ("w2v-bert relative_key", "torch.clamp(distance, -module.left_max_position_embeddings",
                  "torch.clamp(distance, 1 - module.left_max_position_embeddings"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_copy_with_other_results_is_refused(name: str, tmp_path: Path) -> None:
    peer, old, new = CHANGES[name]
    _, other = moved(peer, tmp_path, replacing(old, new))
    with pytest.warns(UserWarning, match=r"but with code of its own; in a trial as .* is off by"):
        report = accelerate(other, verify=True)
    assert not report.accelerated
    with pytest.raises(ValueError, match="is off by"):
        accelerate(other, strict=True, verify=True)


HARMLESS: dict[str, tuple[str, str]] = {
    "espnet": ("(matrix_ac + matrix_bd)", "(matrix_bd + matrix_ac)"),
    "nemo": ("scores = (matrix_ac + matrix_bd) / self.s_d_k", "scores = (matrix_bd + matrix_ac) / self.s_d_k"),
    "speechbrain": ("matrix_ac + matrix_bd", "matrix_bd + matrix_ac"),
    "granite": ("query_states, rel_pos_emb) * self.scale", "query_states * self.scale, rel_pos_emb)"),
    "granite 5": ("position_bias = queries @ relative", "position_bias = 1.0 * queries @ relative"),
    "gemma": ("return term_ac + term_bd_shifted", "return term_bd_shifted + term_ac"),
    "parakeet": ("matrix_bd = matrix_bd * self.scaling", "matrix_bd = self.scaling * matrix_bd"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_changed_copy_with_equal_results_is_accelerated(name: str, tmp_path: Path) -> None:
    case, other = moved(name, tmp_path, replacing(*HARMLESS[name]))
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


@pytest.mark.parametrize("name", HARMLESS)
def test_verify_with_wrapped_layers(name: str, tmp_path: Path) -> None:
    """The width of the input is that of the layer inside."""
    case, other = moved(name, tmp_path, replacing(*HARMLESS[name]))
    before = answer(case)
    for parent in list(other.modules()):
        for leaf, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, leaf, nn.Sequential(layer))
    accelerate(other, strict=True, verify=True, weights="none")
    case.module = other
    torch.testing.assert_close(answer(case), before, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["espnet", "granite", "gemma"])
def test_verify_with_another_default_device(name: str, tmp_path: Path) -> None:
    _, other = moved(name, tmp_path, replacing(*HARMLESS[name]))
    with torch.device("meta"):
        accelerate(other, strict=True, verify=True, weights="none")


def test_cosyvoices_cache() -> None:
    """The cache that comes back is the original's, whoever answers."""
    case = case_of("cosyvoice", "none", held=20)
    module, x, cache, encodings = case.module, case.x, torch.randn(3, 4, 20, 32), torch.randn(1, 129, 64)
    with torch.no_grad():
        want = module(x, x, x, pos_emb=encodings, cache=cache)
        accelerate(module, strict=True)
        got = module(x, x, x, pos_emb=encodings, cache=cache)
    torch.testing.assert_close(got[0], want[0], atol=2e-6, rtol=1e-5)
    assert torch.equal(got[1], want[1])


def test_explain(tmp_path: Path) -> None:
    case, other = moved("espnet", tmp_path, lambda s: s.replace("matrix_ac + matrix_bd", "matrix_bd + matrix_ac"))
    text = explain(other)
    for line in (
        "mine.RelPositionMultiHeadedAttention: like espnet.nets",
        "-        scores = (matrix_ac + matrix_bd) / math.sqrt(",
        "+        scores = (matrix_bd + matrix_ac) / math.sqrt(",
        "register_copy(RelPositionMultiHeadedAttention, of='ESPnetRelPosition')",
    ):
        assert line in text
    assert "by name and source" in explain(case.module)
    accelerate(case.module)
    assert "accelerated by the adapter of espnet" in explain(case.module)
    assert "like no attention that is known" in explain(nn.Linear(2, 2))


def test_register_copy(tmp_path: Path, registered: None) -> None:
    case, other = moved("espnet", tmp_path, lambda s: s.replace("math.sqrt(self.d_k)", "self.d_k**0.5"))
    before = answer(case)
    register_copy(type(other), of="ESPnetRelPosition")
    assert len(accelerate(other, strict=True).accelerated) == 1
    case.module = pickle.loads(pickle.dumps(other))
    torch.testing.assert_close(answer(case), before, atol=2e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"of must be one of Wav2Vec2Conformer, .* got 'ESPnet'"):
        register_copy(type(other), of="ESPnet")
    with pytest.raises(TypeError, match=r"kind must be a subclass of torch\.nn\.Module"):
        register_copy(other, of="ESPnetRelPosition")  # type: ignore[arg-type]


def decorated(method: str) -> Callable[[str], str]:
    """Return a function that adds a decorator to ESPnet's class, which replaces a method as
    use_kernelized_func of transformers 5.0 to 5.13 does `__init__`."""
    decorator = f"""def kernelized(cls):
    before = cls.{method}
    def new(self, *args, **kwargs):
        return before(self, *args, **kwargs)
    cls.{method} = new
    return cls

@kernelized
"""
    line = "class RelPositionMultiHeadedAttention("
    return replacing(line, decorator + line)


def test_class_whose_init_a_decorator_replaces(tmp_path: Path, registered: None) -> None:
    case, other = moved("espnet", tmp_path, decorated("__init__"))
    before = answer(case)
    register_copy(type(other), of="ESPnetRelPosition")
    accelerate(other, strict=True)
    case.module = other
    torch.testing.assert_close(answer(case), before, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["forward", "rel_shift"])
def test_class_whose_computation_a_decorator_replaces(method: str, tmp_path: Path) -> None:
    _, other = moved("espnet", tmp_path, decorated(method))
    with pytest.raises(TypeError, match=f"{method} is not that of its source: it was replaced"):
        register_copy(type(other), of="ESPnetRelPosition")


def test_class_whose_module_is_not_in_sys_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that torch.package or cloudpickle has loaded has no source that inspect finds."""
    _, other = moved("nemo", tmp_path)
    monkeypatch.delitem(sys.modules, type(other).__module__)
    assert "but with code of its own" in explain(other)
    with pytest.warns(UserWarning, match="but with code of its own"):
        assert not accelerate(other).accelerated
    with pytest.raises(OSError, match=r"mine is not in sys\.modules"):
        register_copy(type(other), of="NeMoRelPosition")
    assert "tried out as NeMoRelPosition" in str(accelerate(other, strict=True, verify=True))


@pytest.mark.parametrize("name", ["nemo", "enformer", "zipformer"])
def test_accelerated_module_does_not_need_its_own_in_sys_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These adapters call functions of the original's module: Zipformer's in training."""
    case = case_of(name)
    if name == "zipformer":
        case.module.train().weights.in_proj.weight.data.mul_(15)
    monkeypatch.setattr(random, "random", lambda: 0.05)
    want = answer(case)
    report = accelerate(case.module, strict=True)
    for module in report.accelerated:
        monkeypatch.delitem(sys.modules, type(module.module).original.__module__)
    torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)


def test_each_class_of_a_module_that_is_loaded_again_is_restored(tmp_path: Path, registered: None) -> None:
    """importlib.reload, for example: then classes of the same names exist twice."""
    _, older = moved("nemo", tmp_path)
    kind = type(older)
    register_copy(kind, of="NeMoRelPosition")
    accelerate(older, strict=True)
    _, newer = moved("nemo", tmp_path)
    another = copy.deepcopy(older)
    restore(another)
    accelerate(newer, strict=True)
    accelerate(another, strict=True)
    assert type(another) is type(older)
    assert type(newer) is not type(older)
    assert type(pickle.loads(pickle.dumps(newer))) is type(newer)
    for module in (older, newer, another):
        original = type(module).original
        assert restore(module) == 1
        assert type(module) is original
    assert type(older) is kind
    assert type(newer) is not kind


def test_nested_classes_pickle(tmp_path: Path) -> None:
    _, other = moved("nemo", tmp_path)
    beside, kind = sys.modules[type(other).__module__], type(other)
    source_hash(kind)  # which keeps the source
    kind.__qualname__ = f"Outer.{kind.__name__}"
    beside.Outer = type("Outer", (), {kind.__name__: kind})
    accelerate(other, strict=True)
    assert type(pickle.loads(pickle.dumps(other))) is type(other)


def test_plain_attention_is_not_recognised() -> None:
    """The base classes have the same arguments."""
    cosyvoice, nemo = bare_peers.cosyvoice().MultiHeadedAttention, bare_peers.nemo().MultiHeadAttention
    for kind in (cosyvoice, nemo):
        assert "like no attention that is known" in explain(kind(4, 64, 0.0))
