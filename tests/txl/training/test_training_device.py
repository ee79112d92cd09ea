"""Updates in CUDA graphs. On a GPU only: `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch
from model_helpers import small_config

from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

pytestmark = pytest.mark.gpu
SIZES = {"d_model": 64, "n_head": 2, "d_head": 32, "mem_len": 32}


def run_on_gpu(folder: Path, corpus: Corpus, in_graphs: bool, resume: bool = False, **options: object) -> Trainer:
    config = TrainConfig(
        **({"steps": 40, "batch": 32, "tgt_len": 16, "lr": 3e-3, "eval_tokens": 512, "precision": "bf16"} | options)
    )
    model = small_config(vocab_size=len(corpus.vocabulary), dropout=0.1, attn_dropout=0.1, **SIZES)
    run = Trainer(folder, corpus, model, config, resume=resume, device="cuda")
    if not in_graphs:
        run.updater.graphs = None
    return run


@pytest.mark.parametrize("options", [{}, {"precision": "fp32"}, {"weight_decay": 0.1}], ids=str)
def test_updates_in_graphs_have_the_bits_of_eager_ones(
    tmp_path: Path, corpus: Corpus, options: dict[str, object]
) -> None:
    """A replay draws the same random numbers for dropout."""
    found = []
    torch.use_deterministic_algorithms(True)  # or dr is summed in any order
    try:
        for in_graphs in (False, True):
            run = run_on_gpu(tmp_path / str(in_graphs), corpus, in_graphs, **options)
            run.advance(40)
            assert (run.updater.graphs is not None and run.updater.graphs._gradients is not None) == in_graphs
            tensors = {name: p.detach() for name, p in run.model.named_parameters()}
            found.append(tensors | run.updater.state_dict() | run.batches.state_dict() | run._rng())
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_resumed_run_is_bit_exact(tmp_path: Path, corpus: Corpus) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        straight = run_on_gpu(tmp_path / "straight", corpus, True, eval_every=40, save_every=40)
        straight.run()
        half = run_on_gpu(tmp_path / "half", corpus, True, eval_every=40, save_every=40)
        half.advance(20)
        half.save()
        whole = run_on_gpu(tmp_path / "half", corpus, True, resume=True, eval_every=40, save_every=40)
        whole.run()
    finally:
        torch.use_deterministic_algorithms(False)
    for (name, p), other in zip(straight.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(p, other), name
    assert straight.best_loss == whole.best_loss
