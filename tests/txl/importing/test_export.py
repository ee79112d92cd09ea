"""`txl export`: transformers 4.37.2 computes the same, and `txl import` reads it back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import txl
from txl.errors import TxlError
from txl.evaluation.evaluate import Reading
from txl.importing.checkpoint import convert, export
from txl.text.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from txl.training import checkpoint as checkpoints

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "n_layer": 2,
    "d_model": 24,
    "n_head": 3,
    "d_head": 8,
    "d_inner": 40,
    "mem_len": 6,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"clamp_len": 4},
    "a window, pre-norm": {"window": 6, "pre_norm": True, "untie_r": True, "norm_eps": 1e-3},
    "bins": {"cutoffs": (10, 20), "d_embed": 32, "tie_projs": "tail"},
    "bins, div_val 2": {"cutoffs": (10, 20), "d_embed": 24, "div_val": 2, "tie_projs": "all"},
    "bins, tables of their own": {"cutoffs": (10, 20), "d_embed": 24, "div_val": 2, "tie_weight": False},
}
WORDS = WordVocabulary(["<eos>", "<unk>", *(f"w{n}" for n in range(48))])


def saved(
    path: Path, vocabulary: Vocabulary = WORDS, state: dict[str, Any] | None = None, **options: Any
) -> txl.TransformerXL:
    torch.manual_seed(0)
    model = txl.TransformerXL(txl.ModelConfig(**SIZES | {"initial_memory": "zeros"} | options)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    checkpoints.save(path, model, vocabulary, state or {}, {})
    return model


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the `peers` extra: transformers==4.37.2")
    model = saved(tmp_path / "a.safetensors", **options)
    export(tmp_path / "a.safetensors", tmp_path / "out")
    with pytest.warns(DeprecationWarning, match="trainer_compatible"):
        theirs = transformers.TransfoXLLMHeadModel.from_pretrained(tmp_path / "out").eval()
    mems = memory = None
    with torch.no_grad():
        for length in (7, 5):
            tokens = torch.randint(50, (2, length))
            logits, memory = model(tokens, memory)
            want = theirs(tokens, mems=mems)
            mems = want.mems
            torch.testing.assert_close(logits.log_softmax(-1), want.prediction_scores, rtol=1e-4, atol=1e-4)
    convert(tmp_path / "out", tmp_path / "b.safetensors")
    back = txl.load(tmp_path / "b.safetensors")
    assert back.model.config == model.config or model.config.d_embed is None
    assert back.vocabulary == WORDS
    for (name, a), (other, b) in zip(model.named_parameters(), back.model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "vocabulary",
    [
        ByteVocabulary(bytes(range(40, 90)), b"\n"),
        WordVocabulary(["<S>", "<eos>", "<UNK>", *(f"w{n}" for n in range(47))], lower=True, end="<S>"),
    ],
    ids=["bytes", "words"],
)
def test_settings_that_only_txl_reads_come_back(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """The vocabulary's, and a memory that begins empty."""
    saved(tmp_path / "a.safetensors", vocabulary, initial_memory="empty")
    export(tmp_path / "a.safetensors", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "b.safetensors")
    back = txl.load(tmp_path / "b.safetensors")
    assert (back.vocabulary, back.model.config.initial_memory) == (vocabulary, "empty")


@pytest.mark.parametrize("state", [{}, {"attn_len": 26, "segment": 20}])
@pytest.mark.parametrize("window", [None, 6])
def test_lengths_of_training_come_back(state: dict[str, int], window: int | None, tmp_path: Path) -> None:
    """The lengths are the defaults of evaluation."""
    state = state and state | {"attn_len": window or state["attn_len"]}
    saved(tmp_path / "a.safetensors", state=state, window=window)
    export(tmp_path / "a.safetensors", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "b.safetensors")
    before, back = (txl.load(tmp_path / f"{name}.safetensors") for name in "ab")
    assert (back.attn_len, back.segment) == (before.attn_len, before.segment)
    for method in ("cached", "segments", "sliding"):
        assert back.resolve(Reading(method=method)) == before.resolve(Reading(method=method))


@pytest.mark.parametrize("length", [0, 2**31, 1.5, "8", None])
def test_invalid_segment_length(length: object, tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors")
    export(tmp_path / "a.safetensors", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tgt_len": length}))
    with pytest.raises(TxlError, match=r"the length of training's segments must be from 1 to 2,147,483,647, got "):
        convert(tmp_path / "out", tmp_path / "b.safetensors")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another window": ({"window": 3}, "sees all keys or mem_len=6, not window=3"),
    "Shaw's encoding": ({"encoding": "shaw", "table_len": 9}, "has no encoding='shaw'"),
    "a final norm": ({"final_norm": True}, "has no final_norm=True"),
    "no projection of the same width": (
        {"cutoffs": (10,), "d_embed": 24, "div_val": 2, "proj_same_dim": False}, "proj_same_dim must be True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    saved(tmp_path / "a.safetensors", **options)
    with pytest.raises(TxlError, match=message):
        export(tmp_path / "a.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
