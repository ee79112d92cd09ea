"""Whole models that compute something else are refused, and those that are compared are right."""

import pytest
import torch
from torch import Tensor

from harness.comparison import Unavailable
from implementations.evaluators import EVALUATORS, HUGGING_FACE, CachedEvaluator, check_evaluator, check_vanilla
from implementations.training import HUGGING_FACE as HUGGING_FACE_TRAINED
from implementations.training import TRAINED, Trained
from implementations.training import check as check_training
from txl import TransformerXL

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_are_right(dtype: torch.dtype) -> None:
    for algorithm, (_, _, make) in EVALUATORS.items():
        try:
            check_evaluator(make, dtype, CPU)
        except Unavailable:
            assert algorithm == HUGGING_FACE
    for algorithm in ("vanilla-eager", "vanilla-flash", "vanilla-flash-last"):
        check_vanilla(algorithm, dtype, CPU)


def test_wrong_models_are_refused() -> None:
    class Forgetful(CachedEvaluator):
        def __call__(self, tokens: Tensor) -> Tensor:
            self.reset()
            return super().__call__(tokens)

    check_evaluator(CachedEvaluator, torch.float32, CPU)
    with pytest.raises(AssertionError, match="logits is wrong"):
        check_evaluator(Forgetful, torch.float32, CPU)
    with pytest.raises(AssertionError, match="logits is wrong"):  # one key too many
        check_evaluator(
            lambda model, batch, attn_len, segment: CachedEvaluator(model, batch, attn_len + 1, segment),
            torch.float32,
            CPU,
        )


def test_a_wrong_training_step_is_refused() -> None:
    def without_memory(model: TransformerXL, batch: int) -> Trained:
        return model, lambda tokens: model(tokens)[0]

    for algorithm, (_, _, make) in TRAINED.items():
        try:
            check_training(make, CPU)
        except Unavailable:
            assert algorithm == HUGGING_FACE_TRAINED
    with pytest.raises(AssertionError, match="wrong"):
        check_training(without_memory, CPU)
