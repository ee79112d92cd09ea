"""What ranks do in the tests of the precision that several processes take."""

from pathlib import Path
from types import SimpleNamespace

import torch
from model_helpers import small_config

from txl import precision
from txl.distributed import World
from txl.text import corpus as data
from txl.training import timing
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

CPU = torch.device("cpu")


def decide(world: World, corpus: Path, cases: dict[str, list[tuple[str, float]]]) -> dict[str, str]:
    """In each case the precision of training.

    cases: of each rank its instruction set, and the seconds of an update in bfloat16; float32
    takes 1.
    """
    text = data.load(corpus)
    model = small_config(vocab_size=len(text.vocabulary))
    now, takes = [0.0], [1.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    timing.time = clock  # type: ignore[assignment]
    advance = Trainer.advance

    def advanced(trial: Trainer, updates: int) -> None:
        advance(trial, updates)
        now[0] += updates * (takes[0] if trial.config.precision == "bf16" else 1.0)

    Trainer.advance = advanced  # type: ignore[method-assign]
    found = {}
    for name, ranks in cases.items():
        isa, takes[0] = ranks[world.rank]
        precision.instruction_set = lambda isa=isa: isa  # type: ignore[misc]
        config = TrainConfig(steps=4, batch=4, tgt_len=16)
        trained, _ = timing.with_precision(text, model, config, CPU, world)
        found[name] = trained.precision
    return found
