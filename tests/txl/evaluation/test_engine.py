"""The cached engine equals the model, at constant cost."""

import pytest
import torch
from model_helpers import small_model

from txl import Engine
from txl.errors import TxlError
from txl.evaluation.generate import Sampling, generate

OPTIONS = [
    {},
    {"pre_norm": True},
    {"untie_r": True},
    {"clamp_len": 3},
    {"initial_memory": "zeros", "window": 9},
    {"initial_memory": "zeros", "window": 9, "pre_norm": True},
]


def with_hidden_states(model: torch.nn.Module, tokens: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    memory, parts = None, []
    for part in tokens.split(cuts, 1):
        logits, memory = model(part, memory)
        parts.append(logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cuts", [[30], [6] * 5, [1] * 30, [11, 1, 2, 9, 7]], ids=str)
def test_equals_hidden_state_memory_with_a_window(options: dict[str, object], cuts: list[int]) -> None:
    """A window of mem_len + 1 keys is all that hidden states and cached keys both reach."""
    model = small_model(**({"window": 9} | options))
    tokens = torch.randint(31, (2, 30))
    engine = Engine(model, 2, attn_len=9, max_segment=max(cuts))
    got = torch.cat([engine(part) for part in tokens.split(cuts, 1)], 1)
    torch.testing.assert_close(got, with_hidden_states(model, tokens, cuts).detach(), rtol=0, atol=1e-11)


def test_reset_starts_a_new_text() -> None:
    engine, tokens = Engine(small_model(), 1, 6, 4), torch.randint(31, (1, 4))
    first = engine(tokens)
    engine(tokens)
    engine.reset()
    assert torch.equal(engine(tokens), first)


def test_feed_takes_any_length() -> None:
    model, tokens = small_model(), torch.randint(31, (1, 23))
    engine = Engine(model, 1, 6, 4)
    want = torch.cat([engine(part) for part in tokens.split(4, 1)], 1)[:, -1]
    engine.reset()
    torch.testing.assert_close(engine.feed(tokens), want)


def test_generation_does_not_grow() -> None:
    engine = Engine(small_model(), 1, 6, 4)
    sizes = set()
    for n, _ in enumerate(generate(engine, torch.zeros(1, 3, dtype=torch.long), 60, Sampling())):
        if n > 10:
            sizes.add(tuple(len(cache) for cache in engine.caches))
    assert sizes == {(5, 5)}


@pytest.mark.parametrize("part", ["blocks.1.attention.out", "blocks.1.feed_forward", "logits"])
def test_a_failed_step_leaves_the_caches_as_they_were(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second of two layers, whose first has appended to its cache; after the last one."""
    model, tokens = small_model(), torch.randint(31, (2, 12))
    engine, twin = Engine(model, 2, 6, 4), Engine(model, 2, 6, 4)

    def fails(*_: object) -> None:
        raise MemoryError

    for segment in tokens.split(4, 1):
        with monkeypatch.context() as patched:
            if part == "logits":
                patched.setattr(model, "logits", fails)
            else:
                patched.setattr(model.get_submodule(part), "forward", fails)
            with pytest.raises(MemoryError):
                engine(segment)
        assert torch.equal(engine(segment), twin(segment))


def test_a_failed_call_of_several_segments_must_be_reset() -> None:
    """Unless the failed segment was the first, or the second and had not reached a cache."""
    model, tokens = small_model(), torch.randint(31, (1, 12))
    want = Engine(model, 1, 6, 4).feed(tokens)
    for at, restored in ((1, True), (5, True), (9, False)):
        engine, wrong = Engine(model, 1, 6, 4), tokens.clone()
        wrong[0, at] = 31
        with pytest.raises((IndexError, ValueError)):
            engine.feed(wrong)
        if not restored:
            with pytest.raises(RuntimeError, match="cache is not whole"):
                engine.feed(tokens)
            engine.reset()
        assert torch.equal(engine.feed(tokens), want)
    calls: list[object] = []

    def fails_at_the_third(*given: object) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise MemoryError

    hook = model.blocks[1].feed_forward.register_forward_pre_hook(fails_at_the_third)
    engine = Engine(model, 1, 6, 4)
    with pytest.raises(MemoryError):
        engine.feed(tokens)
    hook.remove()
    with pytest.raises(RuntimeError, match="cache is not whole"):
        engine.feed(tokens)


def test_bad_engines() -> None:
    model = small_model()
    with pytest.raises(TxlError, match=r"the attention length must be >= 1 .*, got 0"):
        Engine(model, 1, 0, 4)
    with pytest.raises(TxlError, match="batch and max_segment must be >= 1, got 0 and 4"):
        Engine(model, 0, 4, 4)
    with pytest.raises(TxlError, match="the prompt is empty"):
        Engine(model, 1, 4, 4).feed(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"at most max_segment=4 positions, .* got shape \[1, 5, 16\]"):
        Engine(model, 1, 4, 4)(torch.zeros(1, 5, dtype=torch.long))
