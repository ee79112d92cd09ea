"""Softmaxes that compute something else are refused, and those that are compared are right."""

from typing import Any

import pytest
import torch
from torch import Tensor

from implementations.models import WT103_WORDS, words, wt103
from implementations.softmax import OURS_4, SMALL, SOFTMAXES, check, checked, log_probs

CPU = torch.device("cpu")


def refused(algorithm: str, loss: Any, message: str) -> None:
    softmax = SOFTMAXES[algorithm]
    with pytest.raises(AssertionError, match=message):
        check(softmax.make, loss, softmax.scores, CPU)


@pytest.mark.parametrize("algorithm", SOFTMAXES)
def test_those_compared_are_right(algorithm: str) -> None:
    checked(algorithm, CPU)()


@pytest.mark.parametrize("factor", [1.001, torch.nan])
@pytest.mark.parametrize("algorithm", SOFTMAXES)
def test_wrong_losses_are_refused(algorithm: str, factor: float) -> None:
    refused(algorithm, lambda *given: SOFTMAXES[algorithm].loss(*given) * factor, "loss is wrong")


@pytest.mark.parametrize("algorithm", SOFTMAXES)
def test_wrong_gradients_are_refused(algorithm: str) -> None:
    """The same loss with 1.01 times the gradient of the states, or of one parameter."""
    softmax = SOFTMAXES[algorithm]
    with torch.device("meta"):
        names = [name for name, _ in softmax.make(wt103(SMALL)).named_parameters()]
    for wrong_one in ("hidden", *names):

        def loss(module: Any, hidden: Tensor, targets: Tensor, name: str = wrong_one) -> Tensor:
            x = hidden if name == "hidden" else module.get_parameter(name)
            x.register_hook(lambda gradient: gradient * 1.01)
            return softmax.loss(module, hidden, targets)

        refused(algorithm, loss, f"gradient of {wrong_one} is wrong")


def test_the_definition_is_a_distribution() -> None:
    softmax = SOFTMAXES[OURS_4]
    found = log_probs(softmax.scores(softmax.make(wt103(SMALL)).double()), torch.randn(3, 410).double())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(3).double())
    assert found.shape == (3, SMALL)


def test_words_follow_zipfs_law() -> None:
    drawn = words(100, 1000, WT103_WORDS, CPU).flatten()
    torch.testing.assert_close(drawn, words(100, 1000, WT103_WORDS, CPU).flatten(), rtol=0, atol=0)
    bins = torch.bucketize(drawn, torch.tensor([20_000, 40_000, 200_000]), right=True).bincount() / len(drawn)
    torch.testing.assert_close(bins, torch.tensor([0.778, 0.059, 0.138, 0.025]), rtol=0, atol=0.005)
    first, eleventh = (drawn == 0).sum(), (drawn == 10).sum()
    assert 4 < first / eleventh < 5.5  # 12.7 / 2.7 = 4.7
