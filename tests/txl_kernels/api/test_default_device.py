"""Calls give the same for every default device and dtype of new tensors."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, as_call, as_fields, leaves, make_inputs
from default_device import DEFAULTS
from internals import ZERO_BIASES
from processes import run_python
from torch import Tensor

from txl_kernels import (
    RelAttention,
    alibi_slopes,
    bounds_from_cu_seqlens,
    end_from_lengths,
    intervals,
    rel_attention,
    rel_attention_weights,
    sinusoid,
    start_from_done,
    t5_buckets,
)
from txl_kernels.backends import cpu, self_check
from txl_kernels.backends.self_check import Kind
from txl_kernels.backends.zero_biases import with_biases

CPU = torch.device("cpu")
Results = list[Tensor]
CASES = [
    Case("plain", L=20, M=9),
    Case("one query", L=1, M=9),
    Case("bounds, dropout", L=9, intervals="random", dropout_p=0.3),
    Case("every term", r_bias="H T", softcap=2.0, Dv=5, causal=False, intervals="padded"),
]


def attention(inputs: dict[str, Any], backend: str) -> Results:
    out, lse = rel_attention(**as_call(inputs), return_lse=True, backend=backend)
    return [out, lse, *torch.autograd.grad(out.square().sum(), list(leaves(inputs).values()))]


def without_biases() -> Results:
    ZERO_BIASES.value.clear()
    q, r = QUERIES.clone().requires_grad_(), TABLE
    weights = rel_attention_weights(q, q, r)
    out = rel_attention(q, q, q, r, dropout_p=0.0)
    return [weights, out, *torch.autograd.grad(out.sum(), q)]


def composed() -> Results:
    q, r = QUERIES, TABLE
    return [
        rel_attention(q, q, q, r, chunk=(4, 1), causal=False, zero_row=q.size(2) - 1, outside="clamp"),
        rel_attention(q, q, q, r, prefix=3, window=4, outside="clamp"),
        rel_attention(q, q, q, r[:, :5], r_descending=True, zero_row=4, outside="clamp", window=5),
    ]


def bounds() -> Results:
    mask = torch.ones(2, 6, 6, dtype=torch.bool, device="cpu").tril()
    lengths = torch.tensor([3, 5], dtype=torch.int64, device="cpu")
    done = torch.zeros(2, 6, dtype=torch.bool, device="cpu")
    packed = torch.tensor([0, 4, 12], dtype=torch.int32, device="cpu")
    found = [*intervals(mask, visible=True), *bounds_from_cu_seqlens(packed, 12), end_from_lengths(lengths)]
    distances = torch.arange(9, device="cpu")
    tables = [sinusoid(distances, 8), t5_buckets(TABLE[0], distances), alibi_slopes(4, device=CPU)]
    return [*found, start_from_done(done, 3), *tables]


def layer() -> Results:
    x, memory = STATES
    out = LAYER(x, memory)
    grads = torch.autograd.grad(out.sum(), list(LAYER.parameters()))
    cache = LAYER.new_cache(batch=2, mem_len=6, max_segment=4)
    with torch.no_grad():
        read = [LAYER(segment, cache=cache) for segment in x.split(4, 1)]
    return [out, *grads, *read]


QUERIES, TABLE = torch.randn(2, 2, 12, 8), torch.randn(2, 12, 8)
STATES = torch.randn(2, 12, 16), torch.randn(2, 5, 16)
LAYER = RelAttention(d_model=16, n_head=2, window=7)
RUNS: dict[str, Callable[[], Results]] = {
    f"{case}, {x}": functools.partial(attention, make_inputs(case, torch.float32), x)
    for case in CASES
    for x in ("native", "reference")
} | {f.__name__: f for f in (without_biases, composed, bounds, layer)}
needs_native = pytest.mark.skipif(cpu.native.module is None, reason="needs the C++ module")


@needs_native
@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", RUNS)
def test_public_functions(name: str, default: str) -> None:
    run = RUNS[name]
    want = run()
    with DEFAULTS[default]():
        got = run()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)  # device and dtype, too


@needs_native
@pytest.mark.parametrize("default", DEFAULTS)
def test_self_check_of_the_first_call(default: str) -> None:
    kinds = [Kind("native", CPU, dtype, 24, decode, True) for dtype in cpu.LIMITS.dtypes for decode in (False, True)]
    kinds.append(kinds[0]._replace(value_width=40, terms=("r", "r_bias", "start", "end"), options=("dropout_p",)))
    kinds.append(kinds[0]._replace(terms=("r_bias",), options=("softcap",)))
    with DEFAULTS[default]():
        assert [self_check.compare(cpu, kind) for kind in kinds] == [None] * len(kinds)


@pytest.mark.slow
@needs_native
def test_importing_under_a_default_device() -> None:
    code = """
import torch
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    import txl_kernels
    from txl_kernels import diagnosis
    q = torch.randn(1, 1, 3, 4, device="cpu", dtype=torch.float32)
    print(txl_kernels.rel_attention(q, q, q, q[0], backend="native").device, len(diagnosis.report()) > 100)
"""
    assert run_python(code) == "cpu True"


def test_zeros_of_missing_biases_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for GPUs read zeros in place of biases that are None."""
    ZERO_BIASES.replace(monkeypatch, {})
    call = as_fields(make_inputs(Case(), torch.float32))._replace(content_bias=None, position_bias=None)
    with torch.inference_mode():
        first = with_biases(call)
    second = with_biases(call)  # what inference mode stored serves training
    assert second.content_bias is first.content_bias
    assert not second.content_bias.is_inference()
    assert not second.content_bias.any()
    torch.func.grad(lambda q: with_biases(call._replace(q=q)).q.sum())(call.q.detach())  # a transform stores nothing
    assert len(ZERO_BIASES.value) == 1
