"""Derivatives of the reference, and its weights."""

import inspect

import pytest
import torch
from cases import BIAS_ALONE, TENSORS, Case, as_call, make_inputs

from txl_kernels import rel_attention, rel_attention_weights


def test_gradcheck_of_the_reference() -> None:
    inputs = make_inputs(Case(B=1, L=2, M=2, D=2, intervals="alternate", dropout_p=0.25))
    alive = torch.isfinite(rel_attention(**as_call(inputs), return_lse=True, backend="reference")[1])
    assert alive.any()

    def f(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = as_call(inputs | dict(zip(TENSORS, tensors, strict=True)))
        out, lse = rel_attention(**call, return_lse=True, backend="reference")
        return out, lse.where(alive, 0.0)

    assert torch.autograd.gradcheck(f, tuple(inputs[n] for n in TENSORS))
    assert torch.autograd.gradgradcheck(f, tuple(inputs[n] for n in TENSORS))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal"), Case("both", causal=False, intervals="random"), Case("none", M=0),
        Case("bias alone, capped", **BIAS_ALONE, softcap=0.8),
    ],
    ids=str,
)  # fmt: skip
def test_weights_are_the_output_for_one_hot_values(case: Case) -> None:
    x, keys = make_inputs(case), case.S
    eye = torch.eye(keys, dtype=torch.float64).expand(case.B, case.H, keys, keys)
    want = rel_attention(**as_call(x | {"v": eye[:, :, case.M :], "v_mem": eye[:, :, : case.M]}), backend="reference")
    names = inspect.signature(rel_attention_weights).parameters.keys() - {"unknown"}
    inputs = as_call(x)
    torch.testing.assert_close(rel_attention_weights(**{name: inputs[name] for name in names}), want)
