"""Softmaxes that compute something else are refused, and those that are compared are right."""

from typing import Any

import pytest
import torch
from torch import Tensor

from implementations.models import WT103_WORDS, words, wt103
from implementations.softmax import OURS, OURS_4, SMALL, SOFTMAXES, TORCH_4, check, checked, log_probs

CPU = torch.device("cpu")


def refused(algorithm: str, loss: Any, message: str) -> None:
    softmax = SOFTMAXES[algorithm]
    with pytest.raises(AssertionError, match=message):
        check(softmax.make, loss, softmax.scores, CPU)


@pytest.mark.parametrize("algorithm", SOFTMAXES)
def test_those_compared_are_right(algorithm: str) -> None:
    checked(algorithm, CPU)()


def without_tails(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    scored = torch.where(targets < softmax.bounds[1], targets, -100)
    return softmax.nll(hidden, scored).mean()


def next_word(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return softmax.nll(hidden, targets + 1).mean()


def without_biases_of_the_bins(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        softmax.cluster_bias.zero_()
    return softmax.nll(hidden, targets).mean()


def a_thousandth_off(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return softmax.nll(hidden, targets).mean() * 1.001


def not_a_number(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return softmax.nll(hidden, targets).mean() * torch.nan


@pytest.mark.parametrize("algorithm", [OURS, OURS_4])
@pytest.mark.parametrize(
    "wrong", [without_tails, next_word, without_biases_of_the_bins, a_thousandth_off, not_a_number]
)
def test_wrong_losses_of_ours_are_refused(algorithm: str, wrong: Any) -> None:
    refused(algorithm, wrong, "loss is wrong")


def test_a_wrong_loss_of_torchs_is_refused() -> None:
    """The last bin's weights in the head are a tenth off."""

    def wrong(softmax: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            softmax.head.weight[-1] *= 1.1
        return SOFTMAXES[TORCH_4].loss(softmax, hidden, targets)

    refused(TORCH_4, wrong, "loss is wrong")


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
