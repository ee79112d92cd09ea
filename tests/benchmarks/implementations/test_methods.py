"""Checks of calls with settings: wrong values and gradients are found."""

import pytest
import torch
from torch import Tensor

from harness.case import Shape
from implementations.methods import Arguments, Method, attend, bidirectional, check, make, padded, passes

CPU, SMALL = torch.device("cpu"), Shape(2, 2, 12, 7, 8)


@pytest.mark.parametrize("backward", [False, True])
def test_call_without_its_setting_fails_the_check(backward: bool) -> None:
    def blind(x: Arguments) -> Tensor:
        return attend({name: y for name, y in x.items() if name != "end"})

    without_memory = SMALL._replace(M=0)
    check(Method("right", padded), without_memory, backward, torch.float32, CPU)
    with pytest.raises(AssertionError, match="out is wrong"):
        check(Method("blind", padded, call=blind), without_memory, backward, torch.float32, CPU)


@pytest.mark.parametrize("name", ["k_mem", "position_bias"])
def test_wrong_gradient_fails_the_check(name: str) -> None:
    def wrong(x: Arguments) -> Tensor:
        return attend(x | {name: x[name] * 1.01 - 0.01 * x[name].detach()})

    method = Method("wrong", bidirectional, call=wrong)
    check(method, SMALL, False, torch.float32, CPU)
    with pytest.raises(AssertionError, match=f"gradient of {name} is wrong"):
        check(method, SMALL, True, torch.float32, CPU)


def test_gradients_do_not_accumulate() -> None:
    x = make(Method("plain", bidirectional), SMALL, torch.float32, CPU)
    run = passes(lambda: attend(x), [x["q"]], backward=True)
    run()
    first = x["q"].grad.clone()
    assert first.any()
    run()
    torch.testing.assert_close(x["q"].grad, first)
    assert not passes(lambda: attend(x), [], backward=False)().requires_grad
