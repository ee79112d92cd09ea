"""Calls that the original answers, by what is asked for and by what masks contain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import case_of, check
from torch import Tensor

from implementations import bare_peers
from implementations.peer_cases import HEADS, PeerCase, answer
from txl_kernels.integrations import accelerate

VALUES = torch.zeros(3, 1, 45, 45).index_fill(3, torch.tensor([3]), -2.0)
AHEAD = torch.arange(75).expand(45, 75).unsqueeze(-1) < 3


def with_mask(name: str, mask: Tensor) -> PeerCase:
    """Return a case whose module gets this mask in place of its own."""
    case = case_of(name)
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


def all_dropped() -> PeerCase:
    case = case_of("nemo", dropout=1.0)
    case.module.train()
    return case


def own_function() -> PeerCase:
    interface = bare_peers.transformers("parakeet").ALL_ATTENTION_FUNCTIONS
    interface.register("mine", lambda module, query, key, value, *args, **kwargs: (value.transpose(1, 2) * 0.5, None))
    case = case_of("parakeet", "none")
    case.module.config._attn_implementation = "mine"
    return case


def cosyvoice_without_shift() -> PeerCase:
    case, encodings = case_of("cosyvoice"), torch.randn(1, 45, 64)
    case.call = lambda f, x: f(x, x, x, pos_emb=encodings)[0]
    return case


def encodings_of_rows() -> PeerCase:
    case, encodings = case_of("espnet transducer", "none", simplified=True), torch.randn(3, 89, 64)
    case.call = lambda f, x: f(x, x, x, encodings, torch.zeros(3, 45, dtype=torch.bool))
    return case


FALLBACKS: dict[str, tuple[Callable[[], PeerCase], str]] = {
    **{f"{name}, holes": (lambda name=name: case_of(name, "holes"), "a mask with holes")
       for name in ("wav2vec2-conformer", "seamless v2", "parakeet", "nemo", "espnet", "espnet legacy", "fastspeech2",
                    "espnet transducer", "speechbrain", "xlnet")},
    "speechbrain, weights": (lambda: case_of("speechbrain", "none", weights=True), "attention weights asked for"),
    "xlnet, segments": (lambda: case_of("xlnet", "none", segments=9), "more than 8 segments in a batch row"),
    "parakeet, additive": (lambda: with_mask("parakeet", torch.ones(3, 1, 45, 45)), "an additive mask"),
    "ding, keys ahead": (lambda: with_mask("ding", AHEAD), "a mask with holes, or that shows keys ahead"),
    "speechbrain, integers": (lambda: with_mask("speechbrain", torch.ones(45, 45).triu(1).to(torch.uint8)),
                              "an additive mask"),
    "wav2vec2-conformer, integers": (lambda: with_mask("wav2vec2-conformer", torch.ones(3, 1, 45, 45).long()),
                                     "an additive mask of other values"),
    "wav2vec2-conformer, values": (lambda: with_mask("wav2vec2-conformer", VALUES),
                                   "an additive mask of other values than 0 and -inf"),
    "wav2vec2-conformer, heads": (lambda: with_mask("wav2vec2-conformer", torch.ones(3, HEADS, 45, 45).bool()),
                                  "a mask for each head"),
    **{f"{name}, one key": (lambda name=name, mask=mask: with_mask(name, mask), "a mask of another number of keys")
       for name, mask in {"parakeet": torch.ones(3, 1, 45, 1).bool(), "wav2vec2-conformer": torch.zeros(3, 1, 45, 1),
                          "ding": torch.zeros(45, 1, 1).bool(), "nemo": torch.zeros(3, 45, 1).bool(),
                          "espnet": torch.ones(3, 45, 1).bool()}.items()},
    "cosyvoice, no shift": (cosyvoice_without_shift,
                            "encodings of other positions: with as many as keys it adds them without a shift"),
    "espnet transducer, encodings": (encodings_of_rows, "encodings that differ between batch rows"),
    "nemo, all dropped": (all_dropped, "everything is dropped"),
    "parakeet, own function": (own_function, "an attention function of one's own, 'mine'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALLBACKS)
def test_original_answers_and_is_counted(name: str) -> None:
    maker, reason = FALLBACKS[name]
    case = maker()
    before = answer(case)
    report = accelerate(case.module, strict=True)
    assert torch.equal(answer(case), before)
    answer(case)
    (counted,) = report.fallbacks
    assert counted.startswith(reason)
    assert report.fallbacks[counted] == 2
    assert f"2 x {reason}" in str(report)


def test_weights_none() -> None:
    case = case_of("speechbrain", "none", weights=True)
    check(case.module, lambda: answer(case), tolerance=2e-5, weights="none")
    assert case.module(case.x, case.x, case.x, torch.zeros(1, 89, 64))[1] is None


COMPILED: dict[str, tuple[Callable[[], PeerCase], str]] = {
    "holes": (lambda: case_of("nemo", "holes"), "hides a key between visible ones"),
    "values": (lambda: with_mask("wav2vec2-conformer", VALUES), "adds other values than 0 and -inf"),
    "keys ahead": (lambda: with_mask("ding", AHEAD), "shows keys ahead"),
    "segments": (lambda: case_of("xlnet", "none", segments=9), "more than 8 segments"),
    "encodings": (lambda: case_of("parakeet", "none", positions=0.3), "encodings differ between batch rows"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_raise(name: str) -> None:
    """Where values decide, a compiled call cannot fall back."""
    maker, message = COMPILED[name]
    case = maker()
    accelerate(case.module, strict=True)
    torch.compiler.reset()
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        case.call(compiled, case.x)


def test_hooks_that_read_weights() -> None:
    """ESPnet's own tools read module.attn in a forward hook."""
    case = case_of("espnet")
    report = accelerate(case.module, strict=True)
    shapes: list[Any] = []
    case.module.register_forward_hook(lambda m, args, out: shapes.append(m.attn.shape))
    answer(case)
    assert shapes == [(3, 4, 45, 45)]
    assert list(report.fallbacks) == ["a forward hook, which may read the weights that the original stores"]
