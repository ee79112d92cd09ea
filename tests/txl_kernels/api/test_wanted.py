"""Backward computes the gradients that somebody wants, and no others."""

import itertools
from typing import Any

import pytest
import torch
from cases import TENSORS, Case, as_call, as_fields, make_inputs

from txl_kernels import rel_attention
from txl_kernels.call import INPUTS

CASES = {
    "tiles": Case("", B=2, H=2, L=60, M=300, D=24, intervals="filled", dropout_p=0.1),
    "few queries": Case("", B=3, H=2, L=2, M=40, D=20),
    "chunks of keys": Case("", B=1, H=1, L=70, M=900, D=16),
    "position queries": Case("", H=4, Hkv=2, L=60, M=300, D=24, Dp=9, sink="heads", rows=80, outside="zero"),
    "position queries, few": Case("", H=4, Hkv=2, L=2, M=40, D=20, Dp=9, sink="queries", rows=20, outside="zero"),
}


def subsets_of(names: list[str]) -> list[list[str]]:
    return [
        *([name] for name in names),
        *(sorted(set(names) - {name}) for name in names),
        ["q", "k", "v"],
        ["r", "content_bias", "position_bias"],
        ["k_mem", "v_mem"],
    ]


def inputs_with(case: Case, wanted: list[str]) -> dict[str, Any]:
    inputs = make_inputs(case, torch.float32)
    return {n: x.detach().requires_grad_(n in wanted) if n in INPUTS else x for n, x in inputs.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_subset_is_the_same_as_of_all(case: Case, kernel_backend: str) -> None:
    if kernel_backend != "native" and case.M > 300:
        pytest.skip("the interpreter is slow")
    names = [name for name in INPUTS if make_inputs(case).get(name) is not None]
    subsets = subsets_of(names) if kernel_backend == "native" else subsets_of(names)[-3:]
    everything = inputs_with(case, names)
    out = rel_attention(**as_call(everything), backend=kernel_backend)
    dout = torch.randn(out.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(out)
    whole = dict(zip(names, torch.autograd.grad(out, [everything[n] for n in names], dout), strict=True))
    for wanted in subsets:
        inputs = inputs_with(case, wanted)
        rel_attention(**as_call(inputs), backend=kernel_backend).backward(dout)
        for name in names:
            got = inputs[name].grad
            assert (got is not None) == (name in wanted)
            if got is not None and kernel_backend == "native":
                assert torch.equal(got, whole[name]), f"{name} of {wanted}"
            elif got is not None:
                torch.testing.assert_close(got, whole[name], msg=lambda m, n=name: f"{n}: {m}")


def test_the_operator_takes_a_mask(kernel_backend: str) -> None:
    """As torch's own backward operators do: what is not wanted is empty, in the fake, too."""
    arguments = (*as_fields(inputs_with(Case("", M=7), [])), kernel_backend)
    out, lse = torch.ops.txl_kernels.rel_attention(*arguments)
    backward = torch.ops.txl_kernels.rel_attention_backward
    everything = backward(out, None, out, lse, *arguments)
    for mask in itertools.islice(itertools.product([True, False], repeat=len(INPUTS)), 0, None, 293):
        torch.library.opcheck(
            backward.default,
            (out, None, out, lse, *arguments, list(mask)),
            test_utils=("test_schema", "test_faketensor"),
        )
        for got, whole, want in zip(
            backward(out, None, out, lse, *arguments, list(mask)), everything, mask, strict=True
        ):
            if want:
                torch.testing.assert_close(got, whole)
            else:
                assert got.shape == (0,)


@pytest.mark.parametrize("entries", [0, 3, 8])
def test_a_mask_of_another_length_is_refused(entries: int) -> None:
    arguments = (*as_fields(inputs_with(Case("", M=7), [])), "native")
    out, lse = torch.ops.txl_kernels.rel_attention(*arguments)
    with pytest.raises(ValueError, match=rf"output_mask must be None or 11 bools, .*; got {entries}"):
        torch.ops.txl_kernels.rel_attention_backward(out, None, out, lse, *arguments, [True] * entries)


def test_no_memory_is_written_where_nobody_wants_it() -> None:
    """dk and dv of a memory that needs no gradient: not even allocated."""
    case = Case("", B=2, H=2, L=4, M=5000, D=64)
    peak = {}
    for wanted in (["q"], list(TENSORS)):
        inputs = inputs_with(case, wanted)
        out = rel_attention(**as_call(inputs), backend="native")
        with torch.profiler.profile(profile_memory=True) as profile:
            out.sum().backward()
        peak[len(wanted)] = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    memory = 2 * 4 * 2 * 2 * 5000 * 64  # keys and values in float32
    assert peak[len(TENSORS)] - peak[1] > memory
    assert peak[1] < memory
