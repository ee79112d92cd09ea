"""What ranks do in the tests of reading; the same as one process when called with `World()`."""

from typing import Any

import numpy as np
import torch
from model_helpers import small_model
from torch import Tensor

from txl.distributed.world import World
from txl.errors import TxlError
from txl.recl.losses import ContextLosses, Losses, finish, measure
from txl.recl.positions import Plan

TEXT = np.random.default_rng(0).integers(0, 31, 153).astype(np.uint8)


class Predict:
    """`ContextLosses` of a small model; one rank fails at a batch of its own."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.model, self.calls, self.fails_at = small_model().float(), 0, fails_at

    def __call__(self, tokens: Tensor, ends: list[int], targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise TxlError("no more")
        with torch.no_grad():
            hidden = self.model.read(tokens, mem_len=0).hidden
            return self.model.softmax.nll(hidden[:, torch.tensor(ends) - 1], targets)


def measured(
    world: World, begun: Losses | None = None, rounds: int | None = None, limit: int | None = None
) -> tuple[Losses, int]:
    """RECL's losses, all or of the first rounds; the batches that this rank read."""
    predict = Predict()
    check: ContextLosses = predict
    steps = measure(check, TEXT, Plan(len(TEXT), 23, 7, 4), batch_tokens=60, begun=begun, limit=limit, world=world)
    if rounds is None:
        return finish(steps), predict.calls
    for _ in range(rounds):
        done = next(steps)
    return done, predict.calls


def readings(world: World, measurements: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything, for one start of the ranks."""
    found: dict[str, Any] = {"measured": {name: measured(world, **options) for name, options in measurements.items()}}
    try:
        finish(
            measure(Predict(2 if world.rank else None), TEXT, Plan(len(TEXT), 23, 7, 4), batch_tokens=60, world=world)
        )
        found["failing"] = "nothing"
    except TxlError as error:
        found["failing"] = str(error)
    return found
