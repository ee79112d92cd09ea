"""Calls that the original answers: by what is asked for, and by what masks hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from implementations.peer_cases import HEADS, answer, make
from txl_kernels.integrations import accelerate

pytestmark = pytest.mark.peers
NUMBERS = torch.zeros(3, 1, 45, 45).index_fill(3, torch.tensor([3]), -2.0)


def with_mask(name: str, mask: Tensor) -> Any:
    """A case whose module gets this mask in place of its own."""
    case = make(name)
    encodings = torch.randn(1, 89, 64)
    calls: dict[str, Callable[..., Any]] = {
        "parakeet": lambda f, x: f(x, encodings.expand(3, -1, -1), attention_mask=mask)[0],
        "wav2vec2-conformer": lambda f, x: f(x, mask, encodings)[0],
        "speechbrain": lambda f, x: f(x, x, x, encodings, None, mask, return_attn_weights=False),
        "ding": lambda f, x: f(x, torch.ones(75, 1, 64), torch.cat([x[:30], x]), *torch.ones(2, 4, 16), mask),
        "nemo": lambda f, x: f(x, x, x, mask, encodings),
        "espnet": lambda f, x: f(x, x, x, encodings, mask),
    }
    case.call = calls[name]
    return case


def in_training(name: str, dropout: float) -> Any:
    case = make(name, dropout=dropout)
    case.module.eval = lambda: case.module  # stays in training
    return case


def own_function(name: str) -> Any:
    from implementations import bare_peers

    interface = bare_peers.transformers(name).ALL_ATTENTION_FUNCTIONS
    interface.register("mine", lambda module, query, key, value, *args, **kwargs: (value.transpose(1, 2) * 0.5, None))
    case = make(name)
    case.module.config._attn_implementation = "mine"
    return case


FALLS_BACK: dict[str, tuple[Callable[[], Any], str]] = {
    **{f"{name}, holes": (lambda name=name: make(name, "holes"), "a mask with holes")
       for name in ("wav2vec2-conformer", "seamless v2", "parakeet", "nemo", "espnet", "espnet legacy", "fastspeech2",
                    "espnet transducer", "speechbrain", "xlnet")},
    "speechbrain, weights": (lambda: make("speechbrain", weights=True), "attention weights asked for"),
    "xlnet, segments": (lambda: make("xlnet", segments=9), "more than 8 segments in a batch row"),
    "parakeet, an additive mask": (lambda: with_mask("parakeet", torch.ones(3, 1, 45, 45)), "an additive mask"),
    "ding, keys ahead": (lambda: with_mask("ding", torch.arange(75).expand(45, 75).unsqueeze(-1) < 3),
                         "a mask with holes, or that shows keys ahead"),
    "speechbrain, numbers": (lambda: with_mask("speechbrain", torch.ones(45, 45).triu(1).to(torch.uint8)),
                             "an additive mask"),
    "wav2vec2-conformer, integers": (lambda: with_mask("wav2vec2-conformer", torch.ones(3, 1, 45, 45).long()),
                                     "an additive mask of other values"),
    "wav2vec2-conformer, values added": (lambda: with_mask("wav2vec2-conformer", NUMBERS),
                                         "an additive mask of other values than 0 and -inf"),
    "wav2vec2-conformer, a mask each head": (
        lambda: with_mask("wav2vec2-conformer", torch.ones(3, HEADS, 45, 45).bool()), "a mask for each head"),
    **{f"{name}, a mask of one key": (lambda name=name, mask=mask: with_mask(name, mask), "a mask of another number of keys")
       for name, mask in {"parakeet": torch.ones(3, 1, 45, 1).bool(), "wav2vec2-conformer": torch.zeros(3, 1, 45, 1),
                          "ding": torch.zeros(45, 1, 1).bool(), "nemo": torch.zeros(3, 45, 1).bool(),
                          "espnet": torch.ones(3, 45, 1).bool()}.items()},
    "nemo, everything dropped": (lambda: in_training("nemo", 1.0), "everything is dropped"),
    "a function of one's own": (lambda: own_function("parakeet"), "an attention function of one's own, 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLS_BACK)
def test_falls_back_and_counts(name: str) -> None:
    maker, reason = FALLS_BACK[name]
    case = maker()
    case.module.eval()
    before = answer(case)
    report = accelerate(case.module, strict=True)
    assert torch.equal(answer(case), before)
    answer(case)
    (counted,) = report.fallbacks
    assert counted.startswith(reason)
    assert report.fallbacks[counted] == 2
    assert f"2 x {reason}" in str(report)


def test_weights_that_a_model_collects() -> None:
    from implementations import bare_peers

    m = bare_peers.transformers("parakeet")
    config = m.ParakeetEncoderConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2,
                                     intermediate_size=64, num_mel_bins=80)  # fmt: skip
    config._attn_implementation = "eager"
    model = m.ParakeetEncoder(config).eval()
    features = torch.randn(1, 160, 80)
    with torch.no_grad():
        want = model(features, output_attentions=True).attentions
        report = accelerate(model, strict=True)
        got = model(features, output_attentions=True).attentions
        assert len(report.rows) == 2
        assert report.fallbacks == {"attention weights asked for": 2}
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        model(features)
    assert report.fallbacks == {"attention weights asked for": 2}


def test_weights_none() -> None:
    case = make("speechbrain", weights=True)
    case.module.eval()
    before = answer(case)
    report = accelerate(case.module, strict=True, weights="none")
    torch.testing.assert_close(answer(case), before, atol=2e-5, rtol=1e-4)
    x = case.x
    assert case.module(x, x, x, torch.zeros(1, 89, 64))[1] is None
    assert not report.fallbacks


COMPILED_BUT_WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "holes": (lambda: make("nemo", "holes"), "hides a key between visible ones"),
    "values added": (lambda: with_mask("wav2vec2-conformer", NUMBERS), "adds other values than 0 and -inf"),
    "keys ahead": (lambda: with_mask("ding", torch.arange(75).expand(45, 75).unsqueeze(-1) < 3), "shows keys ahead"),
    "segments": (lambda: make("xlnet", segments=9), "more than 8 segments"),
    "encodings": (lambda: make("parakeet", positions=0.3), "encodings differ between batch rows"),
}


@pytest.mark.parametrize("name", COMPILED_BUT_WRONG)
def test_what_falls_back_raises_when_compiled(name: str) -> None:
    maker, message = COMPILED_BUT_WRONG[name]
    case = maker()
    case.module.eval()
    accelerate(case.module, strict=True)
    torch.compiler.reset()
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        case.call(compiled, case.x)


def test_hooks_that_read_weights() -> None:
    """ESPnet's own tools read module.attn in a forward hook."""
    case = make("espnet", "right")
    case.module.eval()
    report = accelerate(case.module, strict=True)
    shapes: list[Any] = []
    case.module.register_forward_hook(lambda m, args, out: shapes.append(m.attn.shape))
    answer(case)
    assert shapes == [(3, 4, 45, 45)]
    assert list(report.fallbacks) == ["a forward hook, which may read the weights that the original stores"]
