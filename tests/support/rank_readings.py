"""What ranks do in the tests of reading; the same as one process when called with `World()`."""

from typing import Any

import numpy as np
import torch
from model_helpers import small_model
from torch import Tensor

from txl.distributed import World
from txl.errors import TxlError
from txl.evaluation.evaluate import evaluate
from txl.evaluation.score import Score
from txl.model.config import RecurrentConfig
from txl.model.recurrent import RecurrentNetwork
from txl.recl.losses import ContextLosses, Losses, finish, measure
from txl.recl.positions import Plan

TEXT = np.random.default_rng(0).integers(0, 31, 153).astype(np.uint8)


def lstm() -> RecurrentNetwork:
    torch.manual_seed(0)
    return RecurrentNetwork(
        RecurrentConfig(network="lstm", vocab_size=31, n_layer=2, d_model=8, d_inner=12, dropout=0.0)
    ).double()


def scores(world: World, cases: dict[str, dict[str, Any]]) -> dict[str, Score | str]:
    """Of each case, options of `evaluate` and of the model; an error's words where it is one."""
    models = {"transformer": small_model(), "zeros": small_model(initial_memory="zeros"), "lstm": lstm()}
    found: dict[str, Score | str] = {}
    for name, case in cases.items():
        options = dict(case)
        model = models[options.pop("model", "transformer")]
        fails = options.pop("fails_on", None)

        def told(scored: int, fails: int | None = fails) -> None:
            if world.rank == fails:
                raise TxlError("no more")

        model.train()
        try:
            found[name] = evaluate(model, TEXT, 0, options.pop("attn_len", 12), world=world, progress=told, **options)
        except TxlError as error:
            found[name] = str(error)
        assert model.training
    return found


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


def readings(world: World, cases: dict[str, dict[str, Any]], measurements: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything, for one start of the ranks."""
    found: dict[str, Any] = {"scores": scores(world, cases)}
    found["measured"] = {name: measured(world, **options) for name, options in measurements.items()}
    try:
        finish(
            measure(Predict(2 if world.rank else None), TEXT, Plan(len(TEXT), 23, 7, 4), batch_tokens=60, world=world)
        )
        found["failing"] = "nothing"
    except TxlError as error:
        found["failing"] = str(error)
    return found
