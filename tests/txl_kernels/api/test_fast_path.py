"""Calls that skip the dispatcher: the same results, and tracers and modes still see operators."""

from typing import Any

import pytest
import torch
from cases import Case, as_call, here, make_inputs
from internals import FAST_FORWARD, PREPARED_CALLS
from processes import run_python
from torch.utils._python_dispatch import TorchDispatchMode

from txl_kernels import prepare, rel_attention

CASE = Case("", L=9, M=7)


def call_of(case: Case = CASE, backend: str = "native") -> dict[str, Any]:
    return as_call(make_inputs(case, torch.float32)) | {"backend": backend}


class Operators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_both_operators(kernel_backend: str) -> None:
    call = call_of(backend=kernel_backend)
    want = rel_attention(**call)
    with Operators() as mode:
        out = rel_attention(**call)
        out.sum().backward()
    assert "txl_kernels.rel_attention.default" in mode.seen
    assert "txl_kernels.rel_attention_backward.default" in mode.seen
    assert torch.equal(out, want)


def test_profiler_sees_the_operator(kernel_backend: str) -> None:
    call = call_of(backend=kernel_backend)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rel_attention(**call)
    assert any(event.key == "txl_kernels::rel_attention" for event in profile.key_averages())


def test_dispatcher_is_skipped_without_tracers(kernel_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAST_FORWARD.replace(monkeypatch, None)
    monkeypatch.setattr(torch.ops.txl_kernels, "rel_attention", None)
    monkeypatch.setattr(torch.ops.txl_kernels, "rel_attention_backward", None)
    rel_attention(**call_of(backend=kernel_backend)).sum().backward()
    with torch.no_grad():
        rel_attention(**call_of(backend=kernel_backend))


@pytest.mark.usefixtures("the_same_bits")
@pytest.mark.parametrize("name", ["q", "k", "v", "r", "content_bias"])
def test_gradients_of_negated_views(name: str, kernel_backend: str) -> None:
    """The memory of a view, which forward saves, holds the opposite of its values."""
    call = call_of(backend=kernel_backend)
    opposite = (-call[name].detach()).requires_grad_()
    view = torch._neg_view(call[name].detach()).requires_grad_()
    assert view.is_neg()
    outs = (rel_attention(**call | {name: x}) for x in (opposite, view))
    other = call["v" if name == "q" else "q"]
    found = [torch.autograd.grad(out.square().sum(), [x, other]) for out, x in zip(outs, (opposite, view), strict=True)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_equal_values_of_wrong_types_are_refused(kernel_backend: str) -> None:
    call = call_of(backend=kernel_backend)
    rel_attention(**call | {"causal": True, "window": 2})
    with pytest.raises(TypeError, match="causal must be True or False, got int"):
        rel_attention(**call | {"causal": 1, "window": 2})
    with pytest.raises(TypeError, match="window must be"):
        rel_attention(**call | {"window": 2.0})
    with pytest.raises(TypeError, match="window must be"):
        rel_attention(**call | {"window": True})


def test_memory_of_signatures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_MAX_SIGNATURES", 3)
    PREPARED_CALLS.replace(monkeypatch, {})
    call = call_of()
    for window in range(1, 9):
        rel_attention(**call | {"window": window})
        assert len(PREPARED_CALLS.value) <= 3


def test_batched_gradients_are_those_one_by_one(kernel_backend: str) -> None:
    call = call_of(backend=kernel_backend)
    out = rel_attention(**call)
    several = here(torch.randn(3, *out.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu"))
    together = torch.autograd.grad(out, call["k"], several, retain_graph=True, is_grads_batched=True)[0]
    for got, dout in zip(together, several, strict=True):
        assert torch.equal(got, torch.autograd.grad(out, call["k"], dout, retain_graph=True)[0])


def test_changed_saved_tensor_is_refused(kernel_backend: str) -> None:
    call = call_of(backend=kernel_backend)
    out = rel_attention(**call)
    call["k"].data = torch.empty(0)
    with pytest.raises(ValueError, match="k must be"):
        out.sum().backward()


@pytest.mark.parametrize("first", [0, 1])  # a slice lies at null plus an offset
def test_zeros_without_memory(first: int, kernel_backend: str) -> None:
    call = call_of(Case("", D=1), backend=kernel_backend)
    sizes = (call["v"].size(0) + first, *call["v"].shape[1:])
    zeros = torch._efficientzerotensor(sizes, device=call["v"].device)[first:]
    got = rel_attention(**call | {"v": zeros, "memory": None})
    assert not got.any()
    got.sum().backward()  # reads v again
    assert not call["q"].grad.any()


def test_tensor_of_a_finished_transform(kernel_backend: str) -> None:
    """A wrapper of torch.func.grad remains one, without memory, and its class is Tensor."""
    call = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call_of().items()} | {
        "backend": kernel_backend
    }
    kept = []

    def keep(q: torch.Tensor) -> torch.Tensor:
        kept.append(q * 1)
        return q.sum()

    want = rel_attention(**call)
    torch.func.grad(keep)(call["q"])
    r = call["r"].clone().requires_grad_()
    assert not torch._C._has_storage(kept[0])
    assert torch.equal(rel_attention(**call | {"q": kept[0]}), want)
    out = rel_attention(**call | {"q": kept[0], "r": r})
    assert torch.equal(out, want)
    assert torch.autograd.grad(out.sum(), r)[0].any()


def test_tensors_of_saved_tensor_hooks_are_checked(kernel_backend: str) -> None:
    """Also out and lse, which forward made."""
    call = call_of(backend=kernel_backend)

    def unpack(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 1:] if x.shape == call["q"].shape[:3] else x  # lse

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = rel_attention(**call)
    with pytest.raises(ValueError, match=r"lse must be \[2, 2, 9\] on"):
        out.sum().backward()


def test_output_gradients_of_any_strides(kernel_backend: str) -> None:
    """The plan of a backward is not used for other strides."""
    call = call_of(backend=kernel_backend)
    out, lse = rel_attention(**call, return_lse=True)
    plain, plain_lse = torch.randn_like(out), torch.randn_like(lse)
    columns = plain.transpose(2, 3).contiguous().transpose(2, 3)  # its last axis is strided
    expanded = plain[:, :, :1].expand_as(plain)
    lse_columns = plain_lse.transpose(1, 2).contiguous().transpose(1, 2)

    def gradient(dout: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((out, lse), call["k"], (dout, dlse), retain_graph=True)[0]

    want = gradient(plain, plain_lse)
    for _ in range(2):
        assert torch.equal(gradient(columns, lse_columns), want)
        assert torch.equal(gradient(expanded, plain_lse), gradient(expanded.contiguous(), plain_lse))
        assert torch.equal(gradient(plain, plain_lse), want)


@pytest.mark.slow
def test_torch_without_some_private_names_takes_the_dispatcher() -> None:
    """The package imports, and calls give the same result, by the operators."""
    code = """
import builtins, torch
real, asked = getattr, set()
def without_them(owner, name, *default):
    asked.add(name)
    return default[0] if default and name in ("_is_tracing", "forward_ad") else real(owner, name, *default)
builtins.getattr = without_them
from txl_kernels import rel_attention
builtins.getattr = real
from txl_kernels import torch_state
assert asked >= {"_is_tracing", "forward_ad"}
assert not torch_state.AVAILABLE
assert not torch_state.is_plain()
q = torch.arange(24.).view(1, 2, 3, 4).requires_grad_()
r, u = torch.ones(2, 3, 4), torch.zeros(2, 4)
out = rel_attention(q, q, q, r, u, u, backend="native")
assert torch.allclose(out, rel_attention(q, q, q, r, u, u, backend="reference"), atol=1e-5)
"""
    run_python(code)
