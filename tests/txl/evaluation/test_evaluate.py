"""Evaluation: the score of a split does not depend on how it is cut into steps."""

import math

import numpy as np
import pytest
from model_helpers import small_model

from txl.evaluation.evaluate import evaluate


@pytest.mark.parametrize("segment", [1, 5, 64])
def test_score_does_not_depend_on_the_segment(segment: int) -> None:
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 31, 150).astype(np.uint8)
    score = evaluate(model, tokens, 0, 7, segment=segment, batch=2)
    want = evaluate(model, tokens, 0, 7, segment=33, batch=2)
    assert score.tokens == 150
    assert math.isclose(score.nats, want.nats, rel_tol=1e-6)
    assert math.isclose(score.bpc, score.nats / math.log(2))


def test_forgetting_at_every_segment() -> None:
    model, tokens = small_model(), np.random.default_rng(0).integers(0, 31, 64).astype(np.uint8)
    want = [
        evaluate(model, tokens[n : n + 8], int(tokens[n - 1]) if n else 0, 8, batch=1).nats for n in range(0, 64, 8)
    ]
    got = evaluate(model, tokens, 0, 8, segment=8, batch=1, carry_memory=False)
    assert math.isclose(got.nats, sum(want) / 8, rel_tol=1e-6)
