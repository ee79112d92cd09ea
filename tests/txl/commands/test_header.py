"""What `txl train` says before it trains."""

from pathlib import Path

import pytest
import torch
from training_helpers import trainer

from txl.commands.train import header
from txl.text.corpus import Corpus
from txl_kernels.backends import choose_unasked


def test_every_part_of_it(corpus: Corpus, tmp_path: Path) -> None:
    t = trainer(tmp_path, corpus, steps=2000)
    t.step = 1500
    config = t.model.config
    backend = choose_unasked(torch.device("cpu"), torch.float32, config.d_head)
    assert header(t) == (
        f"Transformer-XL, {config.n_layer} layers x {config.d_model}, "
        f"{sum(p.numel() for p in t.model.parameters()) / 1e6:.2f}M parameters; {backend} backend on cpu, float32; "
        "updates 1,500 to 2,000"
    )


def test_bfloat16_is_named_and_has_its_own_backend(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl.commands.train.choose_unasked", lambda device, dtype, width: f"{device}'s {dtype}")
    assert "; cpu's torch.bfloat16 backend on cpu, bfloat16; " in header(trainer(tmp_path, corpus, precision="bf16"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"encoding": "sinusoid", "mem_len": 0}, "Transformer with sinusoid positions, without memory, "),
        ({"encoding": "shaw", "table_len": 9}, "Transformer with shaw positions, "),
    ],
)
def test_other_models(corpus: Corpus, tmp_path: Path, model: dict, words: str) -> None:
    said = header(trainer(tmp_path, corpus, model=model))
    assert said.startswith(words)
    assert ("; torch on cpu, " in said) == (model["encoding"] == "sinusoid")
