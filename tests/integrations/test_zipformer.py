"""Whole Zipformers with random weights against themselves: outputs, gradients and random draws."""

import copy
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from layer_helpers import ZIPFORMERS, both, case_of, check, compare, compare_seeds, in_float64, vendored
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import answer
from txl_kernels.integrations import accelerate, restore

ASKED = "attention weights asked for"
PENALTY = "a penalty on large scores, which training adds to some calls"
LENGTHS = torch.tensor([45, 33, 3])
SIZES = {
    "downsampling_factor": (1, 2), "encoder_dim": (32, 48), "encoder_unmasked_dim": (24, 32), "num_encoder_layers": (1, 2),
    "query_head_dim": 8, "pos_head_dim": 4, "value_head_dim": 6, "num_heads": (2, 4), "feedforward_dim": 48,
    "cnn_module_kernel": 7, "pos_dim": 16,
}  # fmt: skip
LAYERS = 3


@pytest.fixture(autouse=True)
def plain_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not compiled."""
    monkeypatch.setenv("K2_ONNX_EXPORT", "1")


def model_of(**options: Any) -> Any:
    """Return a Zipformer in evaluation mode, with weights that matter."""
    torch.manual_seed(0)
    model = bare_peers.zipformer().Zipformer(**SIZES | options)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, 0, (4 if "linear_pos" in name else 1) * p[0].numel() ** -0.5)
    return model.eval()


def run(model: Any, padded: bool = True, seed: int = 3) -> dict[str, Tensor]:
    """Return the output and all gradients. seed: of both random generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    x = torch.randn(45, 3, 32, requires_grad=True)
    padding = torch.arange(45) >= LENGTHS.unsqueeze(1) if padded else None
    model.zero_grad()
    out, _ = model(x, LENGTHS, padding)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    named = {"x": x, **dict(model.named_parameters())}
    return {"out": out.detach()} | {n: p.grad.clone() for n, p in named.items() if p.grad is not None}


MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"causal": True},
    "chunks": {"causal": True, "chunk_size": (4,), "left_context_frames": (16,)},
    "chunks, all before": {"causal": True, "chunk_size": (8,), "left_context_frames": (-8,)},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_evaluation(mode: str, padded: bool) -> None:
    """The third row's last queries see no key, and their weights are the same for all keys."""
    model = model_of(**MODES[mode])
    report = check(model, lambda: run(model, padded))
    assert len(report.accelerated) == LAYERS
    state = random.getstate()
    assert restore(model) == LAYERS
    run(model, padded)
    assert random.getstate() == state


def trained(batch: float | None, mode: str = "whole") -> Any:
    """Return a model in training mode, whose schedules are at this batch."""
    model = model_of(**MODES[mode]).train()
    for module in model.modules():
        if hasattr(module, "batch_count"):
            module.batch_count = batch
    return model


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [None, 0.0, 2000.0])
@pytest.mark.parametrize("mode", MODES)
def test_training(mode: str, batch: float | None, dtype: torch.dtype, any_dtype: None) -> None:
    """With all that is random: penalties, positions and layers that are skipped, constant weights.

    In float32 rounding is a large part of some gradients, sums over all frames that nearly cancel.
    In float64 that holds for those of one element, whose largest value is that of all seeds.
    """
    torch.set_default_dtype(dtype)
    try:
        theirs = trained(batch, mode)
        ours = copy.deepcopy(theirs)
        report = accelerate(ours, strict=True)
        without, single = 0, ([], [])
        for seed in range(12):
            before, states = sum(report.fallbacks.values()), []
            found = []
            for model in (ours, theirs):
                found.append(run(model, seed=seed))
                states.append((random.getstate(), torch.get_rng_state().tolist()))
            names = [n for n, x in found[1].items() if x.numel() > 1] if dtype == torch.float64 else ["out", "x"]
            compare({n: found[0][n] for n in names}, {n: found[1][n] for n in names})
            for values, given in zip(single, found, strict=True):
                values.append({n: x for n, x in given.items() if x.numel() == 1})
            assert states[0] == states[1]
            without += sum(report.fallbacks.values()) == before
        if dtype == torch.float64:
            of_all = [{n: torch.stack([x[n] for x in values if n in x]) for n in values[0]} for values in single]
            compare(*of_all)
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(report.fallbacks) == ({PENALTY} if batch is None else {PENALTY, ASKED})
    assert without > 0


def scale_scores(model: nn.Module, factor: float) -> None:
    for name, p in model.named_parameters():
        if name.endswith("weights.in_proj.weight"):
            p.data *= factor


EXTRAS = [(0.9, 9.0, {}), (0.2, 9.0, {ASKED: LAYERS}), (0.05, 0.1, {ASKED: LAYERS}), (0.05, 9.0, {PENALTY: LAYERS})]


@pytest.mark.parametrize(("draw", "factor", "reasons"), EXTRAS)
def test_fallbacks_of_training_are_the_extras(draw: float, factor: float, reasons: dict[str, int]) -> None:
    """By the draws of an early batch: constant weights below 0.25, and penalties below 0.1, which
    small scores do not get; after a penalty the weights are there."""
    model = trained(0.0)
    scale_scores(model, factor)
    report = accelerate(model, strict=True)
    with mock.patch.object(random, "random", return_value=draw):
        run(model)
    assert report.fallbacks == reasons


def test_positions_are_skipped() -> None:
    """Then the scores are those of queries and keys, and linear_pos has no gradient."""
    case = case_of("zipformer", "right")
    case.module.train()
    case.module.weights.pos_emb_skip_rate.default = 1.0
    with mock.patch.object(random, "random", return_value=0.9):
        want = both(case)
        report = accelerate(case.module, strict=True)
        compare(both(case), want)
    assert not report.fallbacks
    assert not any("linear_pos" in name for name in want)


@pytest.mark.filterwarnings("ignore:txl_kernels uses the slow reference backend")
@pytest.mark.parametrize("masks", ["none", "right", "left", "chunks padded"])
@pytest.mark.parametrize("name", ZIPFORMERS)
def test_float64(name: str, masks: str, any_dtype: None) -> None:
    case = case_of(name, masks)
    case.module.double()
    with in_float64(name):
        want = both(case, dtype=torch.float64)
        report = accelerate(case.module, strict=True)
        compare(both(case, dtype=torch.float64), want, 1e-12)
    assert not report.fallbacks


@pytest.mark.parametrize("factor", [0.5, 15.0])
@pytest.mark.parametrize("name", ZIPFORMERS)
def test_training_of_each_package(name: str, factor: float) -> None:
    """Penalties, positions that are skipped, and the draws of packages that have fewer."""
    theirs, ours = case_of(name), case_of(name)
    for case in (theirs, ours):
        case.module.train()
        case.module.weights.pos_emb_skip_rate.default = 0.5
        scale_scores(case.module, factor)
    report = accelerate(ours.module, strict=True)
    compare_seeds(ours, theirs)
    assert set(report.fallbacks) == (set() if name == "zipenhancer" or factor < 1 else {PENALTY})


def stream(model: Any, x: Tensor) -> list[Tensor]:
    """Return the outputs and the last states of a streaming model, in chunks of eight frames."""
    states, outs = model.get_init_states(batch_size=x.size(1)), []
    seen = 0
    for frames in x.split(8):
        left = torch.arange(16).expand(x.size(1), 16) < 16 - seen  # of the cache
        padding = torch.cat([left, torch.zeros(x.size(1), len(frames), dtype=torch.bool)], 1)
        out, _, states = model.streaming_forward(frames, torch.full((x.size(1),), len(frames)), states, padding)
        outs.append(out)
        seen = min(seen + len(frames), 16)
    return [torch.cat(outs), *states]


def test_streaming() -> None:
    model = model_of(causal=True, chunk_size=(8,), left_context_frames=(16,))
    x = torch.randn(40, 2, 32)
    run = torch.no_grad()(lambda: stream(model, x))
    check(model, run)
    report = check(model, run, streaming=True)
    module: Any = report.rows[0].module
    with mock.patch.object(type(module), "why_not_kernel", return_value="not today"):
        want = run()
    assert set(report.fallbacks) == {"not today"}
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


CHANGES = {
    "attn_scores + pos_scores": ("pos_scores + attn_scores", None),
    "limit=25.0": ("limit=20.0", None),
    "masked_fill(attn_mask, -1000)": ("masked_fill(attn_mask, -1)", "is off by"),
    "(seq_len - 1)": ("(seq_len - 2)", "is off by"),
}


@pytest.mark.parametrize("old", CHANGES)
def test_verify(old: str, tmp_path: Path) -> None:
    """A copy with other source is tried out, in evaluation mode."""
    new, difference = CHANGES[old]
    case = case_of("zipformer", "right")
    case.module.weights.__class__ = vendored(
        type(case.module.weights), tmp_path, lambda source: source.replace(old, new)
    )
    want = answer(case)
    with pytest.warns(UserWarning, match=difference or "verify=True tries it out"):
        accelerate(case.module, verify=difference is not None)
    if difference is None:
        assert ", tried out as Zipformer" in str(accelerate(case.module, strict=True, verify=True))
        torch.testing.assert_close(answer(case), want, atol=2e-5, rtol=1e-4)


def test_zipenhancer() -> None:
    """The encoder of ZipEnhancer, in two packages, on frames and frequencies."""
    sizes = {
        name: (value, value) if isinstance(value, int) and name != "pos_dim" else value for name, value in SIZES.items()
    }
    for package in (bare_peers.zipenhancer, bare_peers.modelscope):
        m = bare_peers.beside(package(), "zipenhancer_layer")
        torch.manual_seed(0)
        model = m.Zipformer2DualPathEncoder(**sizes).eval()
        x = torch.randn(2, 32, 21, 10)
        report = check(model, torch.no_grad()(lambda model=model, x=x: model(x)))
        assert len(report.accelerated) == 2 * LAYERS
