"""Checks of attention: wrong values and gradients are found, other implementations are right."""

import pytest
import torch
from torch import Tensor

from harness.case import Shape
from implementations.attention import BASELINE, FLEX, OTHERS, Attention, Inputs, check, fused

CPU = torch.device("cpu")


@pytest.mark.parametrize("factor", [1.001, torch.nan])
@pytest.mark.parametrize("backward", [False, True])
def test_wrong_values_fail_the_check(factor: float, backward: bool) -> None:
    with pytest.raises(AssertionError, match="out is wrong"):
        check(lambda x: fused(x, "reference") * factor, backward, torch.float32, CPU)


@pytest.mark.parametrize("name", ["q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem"])
def test_wrong_gradient_fails_the_check(name: str) -> None:
    def wrong(x: Inputs) -> Tensor:
        # The same value with 1.01 times the gradient.
        return fused(x | {name: x[name] * 1.01 - 0.01 * x[name].detach()}, "reference")

    check(wrong, False, torch.float32, CPU)
    with pytest.raises(AssertionError, match=f"gradient of {name} is wrong"):
        check(wrong, True, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(x, id=x.name, marks=[pytest.mark.nightly] * x.name.endswith("compiled"))
        for x in OTHERS
        if x not in (BASELINE, FLEX)
    ],
)
def test_other_implementations_are_right(attention: Attention, dtype: torch.dtype) -> None:
    if attention.name.endswith("compiled") and dtype is torch.bfloat16:
        pytest.skip("compiling takes longer than all others; the algorithm itself is checked in both dtypes")
    check(attention.compute, True, dtype, CPU)


def wrong_for_one_query(x: Inputs) -> Tensor:
    return fused(x) * (1.001 if x["q"].size(2) == 1 else 1.0)


def test_check_runs_the_kernels_that_are_timed() -> None:
    decode = Shape(1, 8, 1, 3800, 64)
    check(wrong_for_one_query, False, torch.float32, CPU)
    check(fused, False, torch.float32, CPU, decode)
    with pytest.raises(AssertionError, match="out is wrong"):
        check(wrong_for_one_query, False, torch.float32, CPU, decode)
