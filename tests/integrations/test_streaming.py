"""Cache-aware streaming: equal to offline, and what is kept between steps never stale."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import make, sinusoids
from txl_kernels.integrations import accelerate, restore, streaming

pytestmark = pytest.mark.peers
LEFT, CHUNK, LENGTH = 48, 6, 78  # frames; a chunk is seen whole


def stream_nemo(module: nn.Module, x: Tensor, drop: int = 0) -> Tensor:
    """As NeMo's encoder calls a layer in streaming: hidden frames as the cache, masks for all."""
    module.cache_drop_size = drop
    outs, held = [], 0
    cache = x.new_zeros(x.size(0), LEFT, x.size(2))
    for first in range(0, x.size(1), CHUNK):
        frames = x[:, first : first + CHUNK]
        keys = LEFT + frames.size(1)
        hidden = torch.zeros(1, frames.size(1), keys, dtype=torch.bool)
        hidden[:, :, : LEFT - held] = True
        out, cache = module(frames, frames, frames, hidden, sinusoids(keys - 1, 1 - keys, x.size(2)), cache)
        held = min(held + frames.size(1), LEFT)
        outs.append(out)
    return torch.cat(outs, 1)


def offline_nemo(module: nn.Module, x: Tensor) -> Tensor:
    at = torch.arange(x.size(1))
    own = at // CHUNK
    behind = own.unsqueeze(1) - own
    hidden = ~((behind >= 0) & (behind <= LEFT // CHUNK)).unsqueeze(0)
    out: Tensor = module(x, x, x, hidden, sinusoids(x.size(1) - 1, 1 - x.size(1), x.size(2)))
    return out


@pytest.fixture
def nemo() -> nn.Module:
    return make("nemo").module.eval()


def test_nemo_streams_as_offline(nemo: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, LENGTH, 64)
    kept: list[str] = []
    own = streaming.store
    monkeypatch.setattr(streaming, "store", lambda m, name, *rest: (kept.append(name), own(m, name, *rest)))
    monkeypatch.setattr("txl_kernels.integrations.adapters.nemo.store", streaming.store)
    with torch.no_grad():
        theirs, offline = stream_nemo(nemo, x), offline_nemo(nemo, x)
        report = accelerate(nemo, strict=True, streaming=True)
        got = stream_nemo(nemo, x)
        torch.testing.assert_close(got, theirs, atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(got, offline, atol=5e-6, rtol=1e-5)
    steps = LENGTH // CHUNK
    assert kept.count("r") == 1
    assert kept.count("cache") == steps + 1  # the first cache, then each step's
    assert not report.fallbacks


def test_dropped_frames_are_projected_anew(nemo: nn.Module) -> None:
    """cache_drop_size: the last frames of a step, which look-ahead saw too early, are not kept."""
    x = torch.randn(1, LENGTH, 64)
    with torch.no_grad():
        theirs = stream_nemo(nemo, x, drop=2)
        accelerate(nemo, strict=True, streaming=True)
        torch.testing.assert_close(stream_nemo(nemo, x, drop=2), theirs, atol=5e-6, rtol=1e-5)


CHANGES = ("weight in place", "weight's data", "cache", "hook", "forward", "another text", "quantized")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_kept_is_stale(nemo: nn.Module, change: str) -> None:
    """Every step against the original, whatever changes in between."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    accelerate(nemo, strict=True, streaming=True)
    x = torch.randn(1, LENGTH, 64)
    module: Any = nemo
    encodings = sinusoids(LEFT + CHUNK - 1, 1 - LEFT - CHUNK, 64)
    cache = torch.randn(1, LEFT, 64)
    module.cache_drop_size = 0
    with torch.no_grad():
        for step in range(3):
            frames = x[:, step * CHUNK : (step + 1) * CHUNK]
            call = (frames, frames, frames, None, encodings)
            got, following = module(*call, cache)
            want, _ = module.original.forward(module, *call, cache)
            torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)
            cache = following
            if change == "weight in place":
                for p in (module.linear_k.weight, module.linear_v.bias, module.linear_pos.weight):
                    p.mul_(1.3)
            elif change == "weight's data":
                for layer in (module.linear_v, module.linear_pos):
                    layer.weight.data = torch.randn(64, 64)
            elif change == "cache":
                cache[0, -1] += 1.0
            elif change == "hook":
                module.linear_k.register_forward_hook(lambda m, args, out: out * 2.0)
            elif change == "quantized":  # weights of which none has an address
                for name in ("linear_k", "linear_pos"):
                    layer = nn.Linear(64, 64, bias=name == "linear_k").requires_grad_(False)
                    quantize_(layer, Int8WeightOnlyConfig())
                    setattr(module, name, layer)
            elif change == "forward":
                module.linear_pos.forward = lambda x, own=module.linear_pos: nn.Linear.forward(own, x) * -1.5
            else:
                cache = torch.randn(1, LEFT, 64)


def test_nothing_is_kept_unless_asked_for(nemo: nn.Module) -> None:
    """A change through .data does not tell."""
    accelerate(nemo, strict=True)
    x, cache = torch.randn(1, CHUNK, 64), torch.randn(1, LEFT, 64)
    module: Any = nemo
    module.cache_drop_size = 0
    call = (x, x, x, None, sinusoids(LEFT + CHUNK - 1, 1 - LEFT - CHUNK, 64), cache)
    with torch.no_grad():
        module(*call)
        assert nemo not in streaming._stored
        module.linear_k.weight.data.mul_(2.0)
        module.linear_pos.weight.data.mul_(-2.0)
        torch.testing.assert_close(module(*call)[0], module.original.forward(module, *call)[0], atol=5e-6, rtol=1e-5)


def test_more_dropped_than_new(nemo: nn.Module) -> None:
    accelerate(nemo, strict=True, streaming=True)
    module: Any = nemo
    module.cache_drop_size = 4
    cache = torch.randn(1, LEFT, 64)
    with torch.no_grad():
        for frames in (2, 6, 3):
            x = torch.randn(1, frames, 64)
            keys = LEFT + frames
            call = (x, x, x, None, sinusoids(keys - 1, 1 - keys, 64))
            want, _ = module.original.forward(module, *call, cache)
            got, cache = module(*call, cache)
            torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)
            cache = cache[:, -LEFT:]


def test_gradients_pass_through_a_cache(nemo: nn.Module) -> None:
    accelerate(nemo, strict=True, streaming=True)
    nemo.cache_drop_size = 0
    cache = torch.randn(1, LEFT, 64, requires_grad=True)
    x = torch.randn(1, CHUNK, 64)
    keys = LEFT + CHUNK
    call = (x, x, x, None, sinusoids(keys - 1, 1 - keys, 64), cache)
    with torch.no_grad():
        nemo(*call)
    (got,) = torch.autograd.grad(nemo(*call)[0].square().sum(), cache)
    restore(nemo)
    (want,) = torch.autograd.grad(nemo(*call)[0].square().sum(), cache)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=1e-4)


def test_nothing_of_it_is_copied_or_saved(nemo: nn.Module) -> None:
    accelerate(nemo, strict=True, streaming=True)
    keys = list(nemo.state_dict())
    with torch.no_grad():
        stream_nemo(nemo, torch.randn(1, LENGTH, 64))
    assert nemo in streaming._stored
    assert list(nemo.state_dict()) == keys
    import copy

    assert copy.deepcopy(nemo) not in streaming._stored


def nemotron() -> Any:
    m = bare_peers.transformers("nemotron_asr_streaming")
    torch.manual_seed(0)
    config = m.NemotronAsrStreamingEncoderConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, intermediate_size=64,
        num_mel_bins=32, subsampling_conv_channels=8, sliding_window=29, default_num_lookahead_tokens=3,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = m.NemotronAsrStreamingEncoder(config).eval()
    for p in model.parameters():
        if p.dim() == 1 or not p.any():
            nn.init.normal_(p, 0, 0.2)
    return model


def stream_nemotron(model: Any, features: Tensor, chunk: int) -> Tensor:
    """Features in chunks of `chunk` encoder frames, of 8 each; one more for the first."""
    past, padding, outs, first = None, None, [], 0
    while first < features.size(1):
        size = chunk * 8 - 7 if first == 0 else chunk * 8
        part = features[:, first : first + size]
        result = model(part, cache=past, padding_cache=padding, use_cache=True, num_lookahead_tokens=chunk - 1)
        past, padding = result.cache, result.padding_cache
        outs.append(result.last_hidden_state)
        first += size
    return torch.cat(outs, 1)


def test_nemotron_streams_as_offline() -> None:
    model = nemotron()
    features = torch.randn(1, 1 + 8 * 47, 32)
    with torch.no_grad():
        offline = model(features, num_lookahead_tokens=3).last_hidden_state
        theirs = stream_nemotron(model, features, 4)
        report = accelerate(model, strict=True, streaming=True)
        assert len(report.accelerated) == 2
        ours = stream_nemotron(model, features, 4)
        ours_offline = model(features, num_lookahead_tokens=3).last_hidden_state
    assert not report.fallbacks, str(report)
    torch.testing.assert_close(ours_offline, offline, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(ours, offline, atol=2e-4, rtol=1e-4)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Compares with before, and streamed with offline, itself."""
    import runpy
    from pathlib import Path

    example = Path(__file__).parents[2] / "examples" / "speech_encoder.py"
    runpy.run_path(str(example))["main"](layers=2, width=64, left=28, chunk=4, chunks=12)
    said = capsys.readouterr().out
    assert "2 of 2 accelerated" in said
    assert "ms a chunk before" in said
