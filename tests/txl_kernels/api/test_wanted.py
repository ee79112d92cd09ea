"""Backward computes the gradients that are needed, and no others."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from cases import TENSORS, Case, as_call, as_fields, leaves, make_inputs

from txl_kernels import rel_attention
from txl_kernels.call import INPUTS

INKLING = {"H": 4, "Hkv": 2, "Dp": 9, "outside": "zero"}
CASES = [
    Case("tiles", L=60, M=300, D=24, intervals="filled", dropout_p=0.1),
    Case("decode", B=3, L=2, M=40, D=20),
    Case("parts of keys", B=1, H=1, L=70, M=900, D=16),
    Case("position queries", L=60, M=300, D=24, sink="H", T=80, **INKLING),
    Case("position queries, decode", L=2, M=40, D=20, sink="B H L", T=20, **INKLING),
]


def inputs_with(case: Case, wanted: Collection[str]) -> dict[str, Any]:
    inputs = make_inputs(case, torch.float32)
    for name, x in leaves(inputs).items():
        x.requires_grad_(name in wanted)
    return inputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_subset_is_the_same_as_of_all(case: Case, kernel_backend: str) -> None:
    if kernel_backend != "native" and case.M > 300:
        pytest.skip("the interpreter is slow")
    everything = make_inputs(case, torch.float32)
    names = list(leaves(everything))
    subsets = [["q", "k", "v"], ["r", "content_bias", "position_bias"], ["k_mem", "v_mem"]]
    if kernel_backend == "native":
        subsets += [[x] for x in names] + [[y for y in names if y != x] for x in names]
    out = rel_attention(**as_call(everything), backend=kernel_backend)
    dout = torch.randn(out.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(out)
    whole = dict(zip(names, torch.autograd.grad(out, list(leaves(everything).values()), dout), strict=True))
    tolerance = {"rtol": 0.0, "atol": 0.0} if kernel_backend == "native" else {}
    for wanted in subsets:
        inputs = inputs_with(case, wanted)
        rel_attention(**as_call(inputs), backend=kernel_backend).backward(dout)
        for name in names:
            got = inputs[name].grad
            assert (got is not None) == (name in wanted)
            if got is not None:
                torch.testing.assert_close(got, whole[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_operator_takes_an_output_mask(kernel_backend: str) -> None:
    """An unneeded gradient is empty, also in the fake operator, as in torch's backward
    operators."""
    arguments = (*as_fields(inputs_with(Case(M=7), ())), kernel_backend)
    out, lse = torch.ops.txl_kernels.rel_attention(*arguments)
    backward = torch.ops.txl_kernels.rel_attention_backward
    everything = backward(out, None, out, lse, *arguments)
    for mask in itertools.islice(itertools.product([True, False], repeat=len(INPUTS)), 0, None, 293):
        given = (out, None, out, lse, *arguments, list(mask))
        torch.library.opcheck(backward.default, given, test_utils=("test_schema", "test_faketensor"))
        for got, whole, want in zip(backward(*given), everything, mask, strict=True):
            if want:
                torch.testing.assert_close(got, whole)
            else:
                assert got.shape == (0,)


@pytest.mark.parametrize("entries", [0, 3, 8])
def test_output_mask_of_another_length_is_refused(entries: int) -> None:
    arguments = (*as_fields(inputs_with(Case(M=7), ())), "native")
    out, lse = torch.ops.txl_kernels.rel_attention(*arguments)
    with pytest.raises(ValueError, match=rf"output_mask must be None or {len(INPUTS)} bools, .*; got {entries}"):
        torch.ops.txl_kernels.rel_attention_backward(out, None, out, lse, *arguments, [True] * entries)


def test_no_memory_is_written_for_unneeded_gradients() -> None:
    """Gradients of a memory that needs none are not even allocated."""
    case = Case(L=4, M=5000, D=64)
    peak = {}
    for wanted in (["q"], TENSORS):
        out = rel_attention(**as_call(inputs_with(case, wanted)), backend="native")
        with torch.profiler.profile(profile_memory=True) as profile:
            out.sum().backward()
        peak[len(wanted)] = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    memory = 2 * 4 * 2 * 2 * 5000 * 64  # keys and values in float32
    assert peak[len(TENSORS)] - peak[1] > memory
    assert peak[1] < memory
