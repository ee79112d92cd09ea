"""Cache-aware streaming equals offline, and nothing that is stored between steps is stale."""

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import case_of
from small_models import model_of
from torch import Tensor, nn

from implementations.peer_cases import sinusoids
from txl_kernels.integrations import accelerate, restore, streaming

LEFT, CHUNK, LENGTH = 48, 6, 78  # frames; a chunk sees all of itself


def step(module: Any, x: Tensor, cache: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Call a layer as NeMo's encoder does in streaming, with hidden frames as the cache."""
    keys = LEFT + x.size(1)
    result: tuple[Tensor, Tensor] = module(x, x, x, hidden, sinusoids(keys - 1, 1 - keys, x.size(2)), cache)
    return result


def by_original(module: Any, x: Tensor, cache: Tensor) -> Tensor:
    keys = LEFT + x.size(1)
    result: Tensor = module.original.forward(module, x, x, x, None, sinusoids(keys - 1, 1 - keys, x.size(2)), cache)[0]
    return result


def stream(module: Any, x: Tensor, drop: int = 0) -> Tensor:
    """Return all outputs in chunks, with a mask that hides the unused room of the cache."""
    module.cache_drop_size = drop
    outs, held = [], 0
    cache = x.new_zeros(x.size(0), LEFT, x.size(2))
    for frames in x.split(CHUNK, 1):
        hidden = torch.zeros(1, frames.size(1), LEFT + frames.size(1), dtype=torch.bool)
        hidden[:, :, : LEFT - held] = True
        out, cache = step(module, frames, cache, hidden)
        held = min(held + frames.size(1), LEFT)
        outs.append(out)
    return torch.cat(outs, 1)


def offline(module: nn.Module, x: Tensor) -> Tensor:
    own = torch.arange(x.size(1)) // CHUNK
    behind = own.unsqueeze(1) - own
    hidden = ~((behind >= 0) & (behind <= LEFT // CHUNK)).unsqueeze(0)
    out: Tensor = module(x, x, x, hidden, sinusoids(x.size(1) - 1, 1 - x.size(1), x.size(2)))
    return out


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, atol=5e-6, rtol=1e-5)


@pytest.fixture
def nemo() -> Any:
    return case_of("nemo", "none").module


@pytest.mark.parametrize("drop", [0, 2])
def test_streaming_equals_offline(drop: int, nemo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections of a step are stored, but for those of its last `cache_drop_size` frames, which
    look-ahead saw too early."""
    x = torch.randn(2, LENGTH, 64)
    stored: list[str] = []
    store = streaming.store
    monkeypatch.setattr(streaming, "store", lambda m, name, *rest: (stored.append(name), store(m, name, *rest)))
    monkeypatch.setattr("txl_kernels.integrations.adapters.nemo.store", streaming.store)
    keys = list(nemo.state_dict())
    with torch.no_grad():
        theirs, whole = stream(nemo, x, drop), offline(nemo, x)
        report = accelerate(nemo, strict=True, streaming=True)
        got = stream(nemo, x, drop)
        close(got, theirs)
    assert not report.fallbacks
    if drop == 0:
        close(got, whole)
        assert stored.count("r") == 1
        assert stored.count("cache") == LENGTH // CHUNK + 1  # the first cache, then each step's
    assert nemo in streaming._stored
    assert list(nemo.state_dict()) == keys
    assert copy.deepcopy(nemo) not in streaming._stored


CHANGES = ("weight in place", "weight's data", "cache", "hook", "forward", "another sequence", "quantized")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stored_is_stale(nemo: Any, change: str) -> None:
    """Every step equals the original's, whatever changes in between."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    accelerate(nemo, strict=True, streaming=True)
    x, cache = torch.randn(1, LENGTH, 64), torch.randn(1, LEFT, 64)
    nemo.cache_drop_size = 0
    with torch.no_grad():
        for frames in x.split(CHUNK, 1)[:3]:
            got, following = step(nemo, frames, cache)
            close(got, by_original(nemo, frames, cache))
            cache = following
            if change == "weight in place":
                for p in (nemo.linear_k.weight, nemo.linear_v.bias, nemo.linear_pos.weight):
                    p.mul_(1.3)
            elif change == "weight's data":
                for layer in (nemo.linear_v, nemo.linear_pos):
                    layer.weight.data = torch.randn(64, 64)
            elif change == "cache":
                cache[0, -1] += 1.0
            elif change == "hook":
                nemo.linear_k.register_forward_hook(lambda m, args, out: out * 2.0)
            elif change == "quantized":  # weights without addresses
                for name in ("linear_k", "linear_pos"):
                    layer = nn.Linear(64, 64, bias=name == "linear_k").requires_grad_(False)
                    quantize_(layer, Int8WeightOnlyConfig())
                    setattr(nemo, name, layer)
            elif change == "forward":
                nemo.linear_pos.forward = lambda x, own=nemo.linear_pos: nn.Linear.forward(own, x) * -1.5
            else:
                cache = torch.randn(1, LEFT, 64)


def test_nothing_is_stored_by_default(nemo: Any) -> None:
    """A change through .data has no new version."""
    accelerate(nemo, strict=True)
    x, cache = torch.randn(1, CHUNK, 64), torch.randn(1, LEFT, 64)
    nemo.cache_drop_size = 0
    with torch.no_grad():
        step(nemo, x, cache)
        assert nemo not in streaming._stored
        nemo.linear_k.weight.data.mul_(2.0)
        nemo.linear_pos.weight.data.mul_(-2.0)
        close(step(nemo, x, cache)[0], by_original(nemo, x, cache))


def test_more_frames_dropped_than_new(nemo: Any) -> None:
    accelerate(nemo, strict=True, streaming=True)
    nemo.cache_drop_size = 4
    cache = torch.randn(1, LEFT, 64)
    with torch.no_grad():
        for frames in (2, 6, 3):
            x = torch.randn(1, frames, 64)
            want = by_original(nemo, x, cache)
            got, cache = step(nemo, x, cache)
            close(got, want)
            cache = cache[:, -LEFT:]


def test_gradients_of_a_cache(nemo: Any) -> None:
    """A call without gradients stores projections, which a call with gradients does not use."""
    accelerate(nemo, strict=True, streaming=True)
    nemo.cache_drop_size = 0
    x, cache = torch.randn(1, CHUNK, 64), torch.randn(1, LEFT, 64, requires_grad=True)
    with torch.no_grad():
        step(nemo, x, cache)
    (got,) = torch.autograd.grad(step(nemo, x, cache)[0].square().sum(), cache)
    restore(nemo)
    (want,) = torch.autograd.grad(step(nemo, x, cache)[0].square().sum(), cache)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-4)


def stream_nemotron(model: Any, features: Tensor, chunk: int) -> Tensor:
    """Stream features in chunks of `chunk` encoder frames, of 8 each; one more for the first."""
    cache, padding, outs, first = None, None, [], 0
    while first < features.size(1):
        size = chunk * 8 - 7 if first == 0 else chunk * 8
        part = features[:, first : first + size]
        result = model(part, cache=cache, padding_cache=padding, use_cache=True, num_lookahead_tokens=chunk - 1)
        cache, padding = result.cache, result.padding_cache
        outs.append(result.last_hidden_state)
        first += size
    return torch.cat(outs, 1)


def test_nemotron_streaming_equals_offline() -> None:
    model = model_of("Nemotron", attn_implementation="sdpa")
    features = torch.randn(1, 1 + 8 * 47, 32)
    with torch.no_grad():
        whole = model(features, num_lookahead_tokens=3).last_hidden_state
        theirs = stream_nemotron(model, features, 4)
        report = accelerate(model, strict=True, streaming=True)
        assert len(report.accelerated) == 2
        ours = stream_nemotron(model, features, 4)
        ours_whole = model(features, num_lookahead_tokens=3).last_hidden_state
    assert not report.fallbacks, str(report)
    for got, want in ((ours_whole, whole), (ours, theirs), (ours, whole)):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """It compares results with the original's, and streamed with offline."""
    example = Path(__file__).parents[2] / "examples" / "speech_encoder.py"
    runpy.run_path(str(example))["main"](layers=2, width=64, left=28, chunk=4, chunks=12)
    printed = capsys.readouterr().out
    assert "2 of 2 accelerated" in printed
    assert "ms a chunk before" in printed
