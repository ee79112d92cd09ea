"""Whole models, accelerated: the same outputs where tokens or frames are valid, and no call that
falls back."""

import doctest
import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import inkling_models
import pytest
import t5_models
import torch
from layer_helpers import check
from small_models import ENCODERS, KINDS, arguments_of, model_of, randomized, valid_parts
from torch import Tensor, nn

from implementations import bare_peers
from txl_kernels.integrations import accelerate, restore

WHOLE = [
    *((name, implementation) for name in ENCODERS for implementation in ("eager", "sdpa")),
    *((name, "") for name in ("WavLM", "WavLM, norm first", "MPNet", "T5", "XLNet", "Gemma 3n", "Gemma 4")),
]


def test_example_of_the_docstring() -> None:
    names = {"accelerate": accelerate, "model": model_of("Parakeet")}
    (example,) = doctest.DocTestFinder(recurse=False).find(accelerate, globs=names)
    assert doctest.DocTestRunner().run(example) == (0, 2)


@pytest.mark.parametrize(("name", "implementation"), WHOLE)
def test_outputs(name: str, implementation: str) -> None:
    model, given = model_of(name), arguments_of(name)
    if implementation:
        model.set_attn_implementation(implementation)
    run = torch.no_grad()(lambda: valid_parts(model(**given)[0]))
    want = run()
    # SeamlessM4Tv2's mask is bool, and its eager attention adds it to scores, as 0 and 1.
    by_original = (name, implementation) == ("SeamlessM4Tv2", "eager")
    report = check(model, run, {"a bool mask, which eager attention adds to scores": 2} if by_original else {})
    assert len(report.accelerated) == KINDS[name].layers
    assert [row.reason for row in report.rows if not row.concerns] == ["no relative positions"] * name.startswith("S")
    kind = type(report.accelerated[0].module)
    with mock.patch.object(kind, "compute_bias", create=True, side_effect=AssertionError("biases of all pairs")):
        run()
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


@pytest.mark.parametrize("mode", ["full", "causal"])
def test_nemos_transformer(mode: str) -> None:
    torch.manual_seed(0)
    sizes = {"feat_in": 16, "d_model": 64, "n_heads": 4, "n_layers": 2, "pos_emb_max_len": 64}
    encoder = bare_peers.nemo_transformer().TransformerEncoder
    model = randomized(encoder(**sizes, subsampling=None, attn_mode=mode, qk_norm=True))
    frames, lengths = torch.randn(3, 40, 64), torch.tensor([40, 29, 11])  # encoded

    def read() -> Tensor:
        with torch.no_grad():
            hidden, _ = model(frames, lengths, True)
        return torch.cat([hidden[b, :, : int(n)].flatten() for b, n in enumerate(lengths)])

    assert len(check(model, read).accelerated) == 2


WEIGHTS: dict[str, tuple[Any, int]] = {
    **{name: (lambda name=name: (model_of(name, attn_implementation="eager"), arguments_of(name)), layers)
       for name, layers in (("Parakeet", 2), ("WavLM", 3), ("MPNet", 3))},
    "T5 with decoder": (lambda: (t5_models.model_of(implementation="eager"),
                                 t5_models.GIVEN | {"labels": t5_models.LABELS}), 6),
    **{name: (lambda name=name: (inkling_models.model_of(name), {"input_ids": inkling_models.TOKENS}),
              8 if name == "Inkling2Loop" else 4) for name in inkling_models.NAMES},
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_attention_weights(name: str) -> None:
    """The original computes them when a caller asks for them."""
    make, layers = WEIGHTS[name]
    model, given = make()

    def weights() -> list[Tensor]:
        with torch.no_grad():
            out = model(**given, output_attentions=True)
        return [x for key in out if key.endswith("attentions") for x in out[key]]

    report = check(model, weights, {"attention weights asked for": layers}, 1e-5)
    with torch.no_grad():
        model(**given)
    assert report.fallbacks == {"attention weights asked for": layers}


def test_wavlm_in_training() -> None:
    """With layers dropped at random and recomputed: the same layers, the same gradients."""
    options = dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"), 0.0)
    model = model_of("WavLM", layerdrop=0.4, **options)
    model.activation_checkpointing_enable()
    model.train()
    x = torch.randn(2, 480)

    def gradients() -> dict[str, Tensor]:
        torch.manual_seed(7)
        model.zero_grad()
        model(x).last_hidden_state.square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    check(model, gradients)
    assert sum("q_proj.weight" in n for n in gradients()) == 2  # one layer was dropped


@pytest.mark.parametrize("options", [{}, {"bi_data": True}, {"clamp_len": 9}, {"attn_type": "uni"}], ids=str)
def test_xlnet_with_segments_padding_and_memory(options: dict[str, Any]) -> None:
    batch = 4  # bi_data needs an even one
    model = model_of("XLNet", **options)
    tokens = torch.randint(40, (2, batch, 20))
    kinds = (torch.arange(20) > 11).long().expand(batch, 20)
    padded = options.get("attn_type") != "uni"  # with which it adds masks of other shapes in place, and raises
    real = (torch.arange(20) >= torch.tensor([0, 4, 9, 1]).unsqueeze(1) * padded).float()

    def read() -> list[Tensor]:
        given = {"token_type_ids": kinds, "use_mems": True}
        with torch.no_grad():
            first = model(tokens[0], **given)
            second = model(tokens[1], attention_mask=real if padded else None, mems=list(first.mems), **given)
        return [first.logits, second.logits[real.bool()]]

    check(model, read)


def test_xlnets_permutations_fall_back() -> None:
    """A permutation hides keys between visible ones."""
    model = model_of("XLNet")
    tokens = torch.randint(40, (2, 12))
    order = torch.stack([torch.randperm(12) for _ in range(2)])
    target = torch.zeros(2, 1, 12)
    target[:, 0, 5] = 1.0
    given = {"perm_mask": (order.unsqueeze(1) >= order.unsqueeze(2)).float(), "target_mapping": target}
    check(model, torch.no_grad()(lambda: model(tokens, **given).logits), {"a mask with holes": 4}, 2e-5)


@pytest.mark.nightly
def test_the_example_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight minutes: with fewer, the memory of the process itself is no small part. Each case
    compares itself with the original. The predicted memory is the original's beyond ours."""
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
    """The page's code, in the model's own place, supports any length."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hour_of_audio.py"))
    model: nn.Module = example["encoder"]()
    accelerate(model, strict=True)
    features = [torch.randn(1, n, 80) for n in (7, 803, 4001)]
    before = [model(x).last_hidden_state for x in features]
    model.subsampling.forward = functools.partial(example["in_pieces"], model.subsampling.forward)
    for x, expected in zip(features, before, strict=True):
        torch.testing.assert_close(model(x).last_hidden_state, expected, atol=2e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="attention_mask: only None"):
        model(features[0], attention_mask=torch.ones(1, 7))
