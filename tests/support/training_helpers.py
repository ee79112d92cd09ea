"""Small runs, and the comparison of two."""

import json
import os
from pathlib import Path

import torch
from model_helpers import small_config

from txl import paths
from txl.distributed import World
from txl.model.config import config_from_json
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer


def trainer(
    folder: Path | str, corpus: Corpus, *, resume: bool = False, model: dict | None = None, world: World = World(),  # noqa: B008 - frozen
    **options: object,
) -> Trainer:  # fmt: skip
    if model and "network" in model:
        config = config_from_json(
            {"vocab_size": len(corpus.vocabulary), "n_layer": 2, "d_model": 16, "d_inner": 24} | model
        )
        return Trainer(folder, corpus, config, _config(options), resume=resume, world=world)
    sizes = {"vocab_size": len(corpus.vocabulary), "dropout": 0.1, "attn_dropout": 0.1, "mem_len": 24}
    config = small_config(**(sizes | (model or {})))
    return Trainer(folder, corpus, config, _config(options), resume=resume, world=world)


def _config(options: dict[str, object]) -> TrainConfig:
    common = {"steps": 20, "batch": 4, "tgt_len": 16, "lr": 3e-3, "eval_every": 10, "save_every": 5, "log_every": 1}
    common["precision"] = "fp32"  # on any machine
    return TrainConfig(**(common | options))


def unlock(folder: Path) -> None:
    """Release the lock of a run's folder if this process holds it, as its end would."""
    descriptor = paths.locks.pop(str(folder.resolve()), None)
    if descriptor is not None:
        os.close(descriptor)


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoints.load(folder / "last.safetensors").tensors


def assert_same_run(a: Path, b: Path) -> None:
    left, right = contents(a), contents(b)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    states = [checkpoints.load(f / "last.safetensors").state for f in (a, b)]
    assert states[0] == states[1]
    assert (a / "last.safetensors").read_bytes() == (b / "last.safetensors").read_bytes()
    logs = [[json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (a, b)]
    for entries in logs:
        for entry in entries:
            entry.pop("tokens_per_s", None)
    assert logs[0] == logs[1]
