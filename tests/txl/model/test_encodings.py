"""Each encoding against a double loop in float64."""

import copy

import encodings_loop
import pytest
import torch
from model_helpers import small_config, small_model

from txl import TransformerXL
from txl.errors import TxlError

SYSTEMS: dict[str, dict[str, object]] = {
    "relative": {},
    "relative, clamped, windowed": {"clamp_len": 3, "window": 6},
    "relative, pre-norm": {"pre_norm": True, "final_norm": True, "untie_r": True},
    "shaw": {"encoding": "shaw", "table_len": 40},
    "shaw, distances beyond the table": {"encoding": "shaw", "table_len": 4},
    "shaw-released": {"encoding": "shaw-released", "table_len": 5},
    "shaw-released, windowed, pre-norm": {"encoding": "shaw-released", "table_len": 5, "window": 6, "pre_norm": True},
    "sinusoid": {"encoding": "sinusoid"},
    "sinusoid, windowed": {"encoding": "sinusoid", "window": 4},
    "learned": {"encoding": "learned", "table_len": 9},
}


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("mem_len", [0, 30])
def test_against_a_double_loop(options: dict[str, object], mem_len: int) -> None:
    model = small_model(mem_len=mem_len, **options)
    tokens = torch.randint(31, (2, 14))
    memory, past = None, [None, None]
    for part in tokens.split([5, 7, 2], 1):
        states = model.read(part, memory)
        memory = states.memory
        for b in range(2):
            want, past[b] = encodings_loop.read(model, part[b], past[b] if mem_len else None)
            torch.testing.assert_close(states.hidden[b], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
def test_gradients_against_a_double_loop(options: dict[str, object]) -> None:
    model = small_model(**options)
    tokens = torch.randint(31, (1, 6))
    parameters = [p for name, p in model.named_parameters() if not name.startswith("softmax")]
    weights = torch.randn(6, 16, dtype=torch.float64)
    got = torch.autograd.grad((model.read(tokens).hidden[0] * weights).sum(), parameters)
    want = torch.autograd.grad((encodings_loop.read(model, tokens[0])[0] * weights).sum(), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("last", [1, 3])
def test_last_states(options: dict[str, object], last: int) -> None:
    model = small_model(**options)
    memory = model.read(torch.randint(31, (2, 4))).memory
    tokens = torch.randint(31, (2, 7))
    want = model.read(tokens, memory).hidden[:, -last:]
    torch.testing.assert_close(model.read(tokens, memory, last=last).hidden, want, rtol=0, atol=1e-12)


def test_learned_positions_end() -> None:
    model = small_model(encoding="learned", table_len=6)
    with pytest.raises(TxlError, match=r"a segment of 7 tokens is beyond the model's 6 learned positions"):
        model.read(torch.randint(31, (1, 7)))


def test_encodings_in_float32_go_through_the_native_kernel() -> None:
    """The native kernel needs wider heads for Shaw's released encoding."""
    for options in SYSTEMS.values():
        exact = small_model(**options)
        model = TransformerXL(small_config(**options)).eval()
        model.load_state_dict(exact.state_dict())
        tokens = torch.randint(31, (2, 9))
        torch.testing.assert_close(model.read(tokens).hidden.double(), exact.read(tokens).hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
def test_under_autocast(options: dict[str, object]) -> None:
    exact = small_model(**options)
    model = TransformerXL(small_config(**options))
    model.load_state_dict(exact.state_dict())
    tokens = torch.randint(31, (2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        states = model.read(tokens)
        nll = model.softmax.nll(states.hidden, tokens)
    assert nll.dtype == torch.float32
    nll.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(nll.double(), exact.softmax.nll(exact.read(tokens).hidden, tokens), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("options", SYSTEMS.values(), ids=SYSTEMS)
def test_hooks_act_on_the_memory(options: dict[str, object]) -> None:
    """A hook that doubles a linear layer's output equals a weight twice as large."""
    hooked = small_model(**options)
    doubled = copy.deepcopy(hooked)
    for module, other in zip(hooked.modules(), doubled.modules(), strict=True):
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, arguments, output: 2 * output)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(2)
    tokens = torch.randint(31, (2, 9))
    memory = expected = None
    for part in tokens.split([5, 4], 1):
        found, want = hooked.read(part, memory), doubled.read(part, expected)
        torch.testing.assert_close(found.hidden, want.hidden, rtol=0, atol=1e-10)
        memory, expected = found.memory, want.memory
