"""T5 and its copies whole, encoder and decoder: what the original gives for the same tokens, masks
and caches. Our functions for tables of T5's buckets and ALiBi's slopes against transformers'."""

import contextlib
import copy
import gc
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from t5_models import GIVEN, LABELS, model_of

from txl_kernels import alibi_slopes, t5_buckets
from txl_kernels.integrations import accelerate, restore

MODELS = [  # each with the attention implementations that it has
    *((name, implementation) for name in ("T5", "MT5", "UMT5") for implementation in ("sdpa", "eager")),
    ("LongT5", "eager"),
    ("SwitchTransformers", "eager"),
]


def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    loss = model(**GIVEN, labels=LABELS).loss
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)  # an expert without tokens
    return {"loss": loss.detach(), **{n: g for n, g in zip(named, found, strict=True) if g is not None}}


def close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)


def test_all_but_cross_attention_is_accelerated() -> None:
    report = accelerate(model_of(), strict=True)
    assert [row.name for row in report.accelerated] == [
        f"{side}.block.{i}.layer.0.SelfAttention" for side in ("encoder", "decoder") for i in range(3)
    ]
    assert {row.reason for row in report.rows if row.reason} == {"cross-attention, which has no relative positions"}
    assert not report.left_alone


@pytest.mark.parametrize(
    ("name", "implementation", "checkpointing"), [*((*model, False) for model in MODELS), ("T5", "sdpa", True)]
)
def test_loss_and_gradients(name: str, implementation: str, checkpointing: bool) -> None:
    """The tables, which all layers share, have gradients, too; no bias of all pairs is made."""
    model = model_of(name, implementation)
    exact = loss_and_gradients(copy.deepcopy(model).double())
    own = loss_and_gradients(model)
    report = accelerate(model, strict=True)
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    with contextlib.ExitStack() as patches:
        for kind in {type(row.module) for row in report.accelerated}:
            patches.enter_context(mock.patch.object(kind, "compute_bias", side_effect=AssertionError("all pairs")))
        ours = loss_and_gradients(model)
    assert not report.fallbacks
    for key, truth in exact.items():
        # Sums that cancel in float32: 2.8e-6 beyond twice the original's error, by processor.
        allowed = 2 * float((own[key] - truth).abs().max()) + 1e-5 * float(truth.abs().max())
        assert float((ours[key] - truth).abs().max()) <= allowed, key


def generate(model: Any, **options: Any) -> Any:
    model.generation_config.eos_token_id = None
    more = {"max_new_tokens": 14, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return model.generate(**GIVEN, **more, **options)


OPTIONS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}]
GENERATIONS = [
    *((name, "sdpa", options) for name in ("T5", "UMT5") for options in OPTIONS),
    *(("SwitchTransformers", "eager", options) for options in OPTIONS[:2]),
    ("LongT5", "eager", {}),
]


@pytest.mark.parametrize(("name", "implementation", "options"), GENERATIONS)
def test_generation(name: str, implementation: str, options: dict[str, Any]) -> None:
    """Token by token with a cache, in the order of beams, in a cache with unused room."""
    model = model_of(name, implementation)
    want = generate(model, **options)
    report = accelerate(model, strict=True)
    found = generate(model, **options)
    assert torch.equal(found.sequences, want.sequences)
    assert want.sequences.unique().numel() > 3
    torch.testing.assert_close(found.scores, want.scores, rtol=1e-4, atol=1e-5)
    assert not report.fallbacks


def test_window_with_a_cache() -> None:
    """The scores are the same with a static cache, whose keys do not end with the queries."""
    model, scores = model_of(), []
    for window in (None, (3, 0)):
        accelerate(model, window=window)
        scores += [torch.stack(generate(model, cache_implementation=kind).scores) for kind in ("dynamic", "static")]
    torch.testing.assert_close(scores[3], scores[2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores[2], scores[0], rtol=1e-2)


def test_copies_are_independent() -> None:
    """Layers of a copy that are restored do not change the model, nor the model's its copies."""
    model = model_of()
    report = accelerate(model, strict=True)
    want = loss_and_gradients(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert restore(other.encoder.block[1]) == 1
        close(loss_and_gradients(other), want)
        torch.testing.assert_close(loss_and_gradients(model), want, rtol=0, atol=0)
    assert not report.fallbacks
    other = copy.deepcopy(model)
    restore(model)
    torch.testing.assert_close(loss_and_gradients(other), want, rtol=0, atol=0)


def test_removed_layer_is_freed() -> None:
    """Neither the other layers of its stack nor the report keep it."""
    model = model_of()
    report = accelerate(model, strict=True)
    del model.encoder.block[1]
    gc.collect()
    assert report.rows[1].module is None
    assert "encoder.block.1.layer.0.SelfAttention" in str(report)


@pytest.mark.parametrize("buckets", [32, 20])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [128, 40])
def test_buckets(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """The bias of queries and keys, and the gradient of its table."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=16, num_heads=4, d_kv=4, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance, is_decoder=not bidirectional,
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    L = 300
    at = torch.arange(L)
    want = theirs.compute_bias(L, L)[0]  # [H, L, L]
    table = theirs.relative_attention_bias.weight
    bias = t5_buckets(table, torch.arange(1 - L, L), bidirectional=bidirectional, max_distance=max_distance)
    got = bias[:, at[:, None] - at[None, :] + L - 1]
    assert torch.equal(got, want)
    weight = torch.randn(want.shape)
    gradients = [torch.autograd.grad((x * weight).sum(), table)[0] for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 20])
def test_alibi_slopes(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    want = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [H, 1, 2]: slope times position
    torch.testing.assert_close(alibi_slopes(heads), want[:, 0, 1], rtol=1e-6, atol=0)
