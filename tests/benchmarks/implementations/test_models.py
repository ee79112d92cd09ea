"""Checks of whole models: wrong models are found, those that are compared are right."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from implementations.evaluators import (
    EVALUATORS,
    CachedEvaluator,
    check_evaluator,
    check_vanilla,
    operations,
    vanilla,
    vanilla_operations,
)
from implementations.models import SMALL
from implementations.training import TRAINED, Trained
from implementations.training import check as check_training
from txl import TransformerXL

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_are_right(dtype: torch.dtype) -> None:
    for _, _, make in EVALUATORS.values():
        check_evaluator(make, dtype, CPU)
    for algorithm in ("vanilla-eager", "vanilla-flash", "vanilla-flash-last"):
        check_vanilla(algorithm, dtype, CPU)


def test_wrong_models_fail_the_check() -> None:
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


def test_wrong_training_step_fails_the_check() -> None:
    def without_memory(model: TransformerXL, batch: int) -> Trained:
        return lambda tokens: model(tokens)[0]

    for _, _, make in TRAINED.values():
        check_training(make, CPU)
    with pytest.raises(AssertionError, match="wrong"):
        check_training(without_memory, CPU)


def test_operations_equal_torchs_count() -> None:
    """torch counts plain attention as products over all pairs, and ours as an operator."""
    attn_len, width = 13, SMALL.n_head * SMALL.d_head
    model = TransformerXL(SMALL).eval()
    engine = CachedEvaluator(model, 1, attn_len, 4)
    with FlopCounterMode(display=False) as counted:
        engine(torch.zeros(1, 4, dtype=torch.long))
    products = counted.get_total_flops() - counted.get_flop_counts()["Global"][torch.ops.txl_kernels.rel_attention]
    assert operations(SMALL, attn_len) - 6 * attn_len * width * SMALL.n_layer == products / 4
    window = torch.zeros(1, attn_len, dtype=torch.long)
    for algorithm, whole_layers in (("vanilla-flash", SMALL.n_layer), ("vanilla-flash-last", SMALL.n_layer - 1)):
        predict = vanilla(model, algorithm)
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            predict(window)
        hidden_pairs = 2 * attn_len * attn_len * width * whole_layers
        # The counter watches modules: then the last layer projects queries of all positions.
        watched = 2 * (attn_len - 1) * SMALL.d_model * width * (SMALL.n_layer - whole_layers)
        assert vanilla_operations(SMALL, algorithm, attn_len) + hidden_pairs + watched == counted.get_total_flops()
