"""Attention that computes something else is refused, and what is compared with ours is right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.case import Shape
from implementations.attention import BASELINE, FLEX, OTHERS, Attention, Inputs, check, fused, plain_sdpa

CPU = torch.device("cpu")


def without_position_bias(x: Inputs) -> Tensor:
    return fused(x | {"position_bias": torch.zeros_like(x["position_bias"])}, "reference")


def shifted_by_one(x: Inputs) -> Tensor:
    return fused(x | {"r": x["r"].roll(1, 1)}, "reference")


def without_memory(x: Inputs) -> Tensor:
    return fused(x | {"k_mem": x["k_mem"][:, :, :0], "v_mem": x["v_mem"][:, :, :0]}, "reference")


def sees_the_future(x: Inputs) -> Tensor:
    return plain_sdpa(x)


def a_thousandth_off(x: Inputs) -> Tensor:
    return fused(x, "reference") * 1.001


def not_a_number(x: Inputs) -> Tensor:
    return fused(x, "reference") * torch.nan


@pytest.mark.parametrize(
    "wrong",
    [without_position_bias, shifted_by_one, without_memory, sees_the_future, a_thousandth_off, not_a_number],
)
@pytest.mark.parametrize("backward", [False, True])
def test_wrong_values_are_refused(wrong: Callable[[Inputs], Tensor], backward: bool) -> None:
    with pytest.raises(AssertionError, match="out is wrong"):
        check(wrong, backward, torch.float32, CPU)


@pytest.mark.parametrize("name", ["q", "k", "v", "r", "content_bias", "position_bias", "k_mem", "v_mem"])
def test_a_wrong_gradient_is_refused(name: str) -> None:
    def wrong(x: Inputs) -> Tensor:
        # The same value with 1.01 times the gradient.
        return fused(x | {name: x[name] * 1.01 - 0.01 * x[name].detach()}, "reference")

    check(wrong, False, torch.float32, CPU)
    with pytest.raises(AssertionError, match=f"gradient of {name} is wrong"):
        check(wrong, True, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [x for x in OTHERS if x not in (BASELINE, FLEX)], ids=lambda x: x.algorithm)
def test_the_others_are_right(attention: Attention, dtype: torch.dtype) -> None:
    if attention.algorithm.endswith("compiled") and dtype is torch.bfloat16:
        pytest.skip("compiling takes longer than all others; the algorithm itself is checked in both dtypes")
    check(attention.compute, True, dtype, CPU)


def wrong_for_one_query(x: Inputs) -> Tensor:
    return fused(x) * (1.001 if x["q"].size(2) == 1 else 1.0)


def test_the_check_takes_the_path_that_is_timed() -> None:
    decode = Shape(1, 8, 1, 3800, 64)
    check(wrong_for_one_query, False, torch.float32, CPU)
    check(fused, False, torch.float32, CPU, decode)
    with pytest.raises(AssertionError, match="out is wrong"):
        check(wrong_for_one_query, False, torch.float32, CPU, decode)
