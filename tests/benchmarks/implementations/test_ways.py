"""Calls with settings that compute something else are refused; settings change what is checked."""

import pytest
import torch
from torch import Tensor

from harness.case import Shape
from implementations.ways import Arguments, Way, attend, bidirectional, check, make, padded, passes

CPU, SMALL = torch.device("cpu"), Shape(2, 2, 12, 7, 8)


@pytest.mark.parametrize("backward", [False, True])
def test_a_call_without_its_setting_is_refused(backward: bool) -> None:
    def blind(x: Arguments) -> Tensor:
        return attend({name: y for name, y in x.items() if name != "end"})

    without_memory = SMALL._replace(M=0)
    check(Way("told", padded), without_memory, backward, torch.float32, CPU)
    with pytest.raises(AssertionError, match="out is wrong"):
        check(Way("blind", padded, call=blind), without_memory, backward, torch.float32, CPU)


@pytest.mark.parametrize("name", ["q", "v", "k_mem", "r", "position_bias"])
def test_a_wrong_gradient_is_refused(name: str) -> None:
    def wrong(x: Arguments) -> Tensor:
        return attend(x | {name: x[name] * 1.01 - 0.01 * x[name].detach()})

    way = Way("wrong", bidirectional, call=wrong)
    check(way, SMALL, False, torch.float32, CPU)
    with pytest.raises(AssertionError, match=f"gradient of {name} is wrong"):
        check(way, SMALL, True, torch.float32, CPU)


def test_gradients_do_not_add_up() -> None:
    x = make(Way("plain", bidirectional), SMALL, torch.float32, CPU)
    run = passes(lambda: attend(x), [x["q"]], backward=True)
    run()
    first = x["q"].grad.clone()
    assert first.any()
    run()
    torch.testing.assert_close(x["q"].grad, first)
    assert not passes(lambda: attend(x), [], backward=False)().requires_grad
