"""`txl train --compile`, by torch's own compiler."""

import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from training_helpers import trainer

from txl.text.corpus import Corpus


@pytest.mark.slow  # the C++ compiler takes its time
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own question
def test_losses_are_those_of_eager_training(corpus: Corpus, tmp_path: Path) -> None:
    """The memory is full in the last updates; validations lie between them."""
    torch.compiler.reset()
    counters.clear()
    plain = {"dropout": 0.0, "attn_dropout": 0.0}
    for name in ("eager", "compiled"):
        run = trainer(tmp_path / name, corpus, model=plain, steps=6, eval_every=3, compile=name == "compiled")
        run.run()
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("eager", "compiled")]
    for eager, compiled in zip(*([json.loads(line) for line in log] for log in logs), strict=True):
        for entry in (eager, compiled):
            entry.pop("tokens_per_s", None)
        assert compiled == pytest.approx(eager, rel=1e-4)
    assert 0 < counters["stats"]["unique_graphs"] <= 3  # of all layers
    assert not counters["graph_break"]
