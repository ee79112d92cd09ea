"""Whole models of transformers, tiny and with random weights, accelerated: the same outputs where
tokens or frames are real, and no call that falls back."""

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implementations import bare_peers
from txl_kernels.integrations import accelerate, restore

pytestmark = pytest.mark.peers
LENGTHS = (60, 41, 24)


def _randomised(model: nn.Module) -> Any:
    for name, p in model.named_parameters():
        if p.dim() == 1 or "bias" in name or not p.any():
            nn.init.normal_(p, 1.0 if "norm" in name and "weight" in name else 0.0, 0.2)
    return model.eval()


def conformer() -> Any:
    m = bare_peers.transformers("wav2vec2_conformer")
    config = m.Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(16, 16),
        conv_stride=(4, 2), conv_kernel=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        position_embeddings_type="relative", mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    return _randomised(m.Wav2Vec2ConformerModel(config))


def w2v_bert(kind: str) -> Any:
    m = bare_peers.transformers("wav2vec2_bert")
    config = m.Wav2Vec2BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, feature_projection_input_dim=10,
        position_embeddings_type=kind, left_max_position_embeddings=12, right_max_position_embeddings=5,
        mask_time_prob=0.0, layerdrop=0.0, conformer_conv_dropout=0.0,
    )  # fmt: skip
    return _randomised(m.Wav2Vec2BertModel(config))


def parakeet() -> Any:
    m = bare_peers.transformers("parakeet")
    config = m.ParakeetEncoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_mel_bins=16,
        subsampling_conv_channels=8, layerdrop=0.0,
    )  # fmt: skip
    return _randomised(m.ParakeetEncoder(config))


def seamless(version: str, prefix: str) -> Any:
    """With an adapter, whose attention has no relative positions."""
    m = bare_peers.transformers(version)
    config = getattr(m, f"{prefix}Config")(
        hidden_size=32, speech_encoder_layers=2, speech_encoder_attention_heads=2, speech_encoder_intermediate_size=32,
        feature_projection_input_dim=16, num_adapter_layers=1, add_adapter=True,
    )  # fmt: skip
    return _randomised(getattr(m, f"{prefix}SpeechEncoder")(config))


ENCODERS: dict[str, tuple[Callable[[], Any], int]] = {
    "Wav2Vec2-Conformer": (conformer, 0),
    "w2v-BERT relative": (lambda: w2v_bert("relative"), 10),
    "w2v-BERT relative_key": (lambda: w2v_bert("relative_key"), 10),
    "Parakeet": (parakeet, 16),
    "SeamlessM4T": (lambda: seamless("seamless_m4t", "SeamlessM4T"), 16),
    "SeamlessM4Tv2": (lambda: seamless("seamless_m4t_v2", "SeamlessM4Tv2"), 16),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ENCODERS)
def test_speech_encoders(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    maker, width = ENCODERS[name]
    model = maker()
    model.set_attn_implementation(implementation)
    scale = 1 if width else 8  # samples of a frame
    longest = max(LENGTHS) * scale
    x = torch.randn(3, longest, width) if width else torch.randn(3, longest)
    mask = torch.arange(longest) < torch.tensor(LENGTHS).unsqueeze(1) * scale
    with torch.no_grad():
        before = model(x, attention_mask=mask.long()).last_hidden_state
        report = accelerate(model, strict=True)
        after = model(x, attention_mask=mask.long()).last_hidden_state
    assert len(report.accelerated) == 2
    assert [row.reason for row in report.rows if not row.concerns] == ["no relative positions"] * name.startswith("S")
    # SeamlessM4Tv2's mask is bool, and its eager attention adds it to scores, as 0 and 1.
    by_original = (name, implementation) == ("SeamlessM4Tv2", "eager")
    assert report.fallbacks == ({"a bool mask, which eager attention adds to scores": 2} if by_original else {})
    for b, length in enumerate(LENGTHS):
        frames = max(before.size(1) * length // max(LENGTHS) - 2, 1)
        torch.testing.assert_close(after[b, :frames], before[b, :frames], atol=2e-4, rtol=1e-3)


def xlnet(**options: Any) -> Any:
    m = bare_peers.transformers("xlnet")
    config = m.XLNetConfig(
        vocab_size=40, d_model=32, n_layer=2, n_head=2, d_inner=32, dropout=0.0, mem_len=16, **options
    )
    return _randomised(m.XLNetLMHeadModel(config))


@pytest.mark.parametrize("options", [{}, {"bi_data": True}, {"clamp_len": 9}, {"attn_type": "uni"}], ids=str)
def test_xlnet_with_segments_padding_and_memory(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = 4  # bi_data wants an even one
    model = xlnet(**options)
    tokens = torch.randint(40, (2, batch, 20))
    kinds = (torch.arange(20) > 11).long().expand(batch, 20)
    padded = options.get("attn_type") != "uni"  # with which it adds masks of other shapes in place, and raises
    real = (torch.arange(20) >= torch.tensor([0, 4, 9, 1]).unsqueeze(1) * padded).float()

    def read() -> list[Tensor]:
        with torch.no_grad():
            first = model(tokens[0], token_type_ids=kinds, use_mems=True)
            second = model(
                tokens[1],
                attention_mask=real if padded else None,
                token_type_ids=kinds,
                mems=list(first.mems),
                use_mems=True,
            )
        return [first.logits, second.logits[real.bool()]]

    before = read()
    report = accelerate(model, strict=True)
    after = read()
    assert not report.fallbacks, str(report)
    for got, want in zip(after, before, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(read(), before, strict=True))


def test_xlnet_that_predicts_in_another_order() -> None:
    """A permutation hides keys between visible ones: its own attention answers, exactly."""
    torch.manual_seed(0)
    model = xlnet()
    tokens = torch.randint(40, (2, 12))
    order = torch.stack([torch.randperm(12) for _ in range(2)])
    hidden = (order.unsqueeze(1) >= order.unsqueeze(2)).float()  # sees what comes before it in the order
    target = torch.zeros(2, 1, 12)
    target[:, 0, 5] = 1.0
    with torch.no_grad():
        before = model(tokens, perm_mask=hidden, target_mapping=target).logits
        report = accelerate(model, strict=True)
        after = model(tokens, perm_mask=hidden, target_mapping=target).logits
    assert set(report.fallbacks) == {"a mask with holes"}
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-4)


def gemma() -> tuple[Any, tuple[Any, ...]]:
    m = bare_peers.transformers("gemma3n")
    config = m.Gemma3nAudioConfig(
        hidden_size=32, conf_num_attention_heads=4, conf_num_hidden_layers=2, conf_attention_context_left=9,
        conf_attention_chunk_size=8, sscp_conv_channel_size=(8, 4), input_feat_size=32,
    )  # fmt: skip
    padding = torch.arange(160) >= torch.tensor([[160], [90]])
    return _randomised(m.Gemma3nAudioEncoder(config)), (torch.randn(2, 160, 32), padding)


def gemma4() -> tuple[Any, tuple[Any, ...]]:
    m = bare_peers.transformers("gemma4")
    config = m.Gemma4AudioConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, subsampling_conv_channels=(8, 4), output_proj_dims=16,
        attention_chunk_size=8, attention_context_left=9,
    )  # fmt: skip
    real = torch.arange(160) < torch.tensor([[160], [90]])
    return _randomised(m.Gemma4AudioModel(config)), (torch.randn(2, 160, 8), real)


def nemo_transformer(mode: str) -> tuple[Any, tuple[Any, ...]]:
    m = bare_peers.nemo_transformer()
    model = m.TransformerEncoder(
        feat_in=16,
        d_model=64,
        n_heads=4,
        n_layers=2,
        subsampling=None,
        attn_mode=mode,
        qk_norm=True,
        pos_emb_max_len=64,
    )
    return _randomised(model), (torch.randn(3, 40, 64), torch.tensor([40, 29, 11]), True)  # encoded frames


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "Gemma 3n": gemma,
    "Gemma 4": gemma4,
    "NeMo's Transformer": lambda: nemo_transformer("full"),
    "NeMo's Transformer, causal": lambda: nemo_transformer("causal"),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MODELS)
def test_other_models(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()

    def read() -> Tensor:
        with torch.no_grad():
            found = model(*inputs)
        if name.startswith("NeMo"):
            hidden, lengths = found
            return torch.cat([hidden[b, :, : int(n)].flatten() for b, n in enumerate(lengths)])
        out: Tensor = found.last_hidden_state
        return out[found.attention_mask] if name == "Gemma 4" else out

    before = read()
    report = accelerate(model, strict=True)
    assert len(report.accelerated) == 2
    torch.testing.assert_close(read(), before, atol=2e-4, rtol=1e-3)
    assert not report.fallbacks, str(report)


def test_the_example_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight minutes: of fewer, the memory of the process itself is no small part. Each case
    compares itself with the original; what that is said to need is what it takes beyond ours."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hour_of_audio.py"))
    found = example["main"](tmp_path, minutes=(8,))
    more = found["original"]["8"]["gib"] - found["accelerated"]["8"]["gib"]
    assert more == pytest.approx(example["needed"](6000), rel=0.15)
    assert example["needed"](45_000) == pytest.approx(241, abs=1)
    assert (tmp_path / "hour_of_audio.png").stat().st_size > 1_000
    assert json.loads((tmp_path / "hour_of_audio.json").read_text()) == found


@torch.no_grad()
def test_subsampling_in_pieces() -> None:
    """As the docs say it: in the model's own place, any length."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hour_of_audio.py"))
    model = example["encoder"]()
    accelerate(model, strict=True)
    lengths = (7, 803, 4001)
    features = [torch.randn(1, n, 80) for n in lengths]
    before = [model(x).last_hidden_state for x in features]
    model.subsampling.forward = functools.partial(example["in_pieces"], model.subsampling.forward)
    for x, expected in zip(features, before, strict=True):
        torch.testing.assert_close(model(x).last_hidden_state, expected, atol=2e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="attention_mask: only None"):
        model(features[0], attention_mask=torch.ones(1, 7))
