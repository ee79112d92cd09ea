"""What ranks do in the tests of reading; the same as one process when called with `World()`."""

from typing import Any

import numpy as np
import torch
from model_helpers import small_model

from txl.distributed.world import World
from txl.errors import TxlError
from txl.evaluation.evaluate import evaluate
from txl.evaluation.score import Score
from txl.model.recurrent import RecurrentNetwork
from txl.model.recurrent_config import RecurrentConfig

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
