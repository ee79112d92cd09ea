"""Updates in CUDA graphs equal those that Python issues (by a recorder; on a device in
test_training_device.py)."""

from pathlib import Path

import pytest
import torch
from recorder import recorded
from torch import Tensor
from training_helpers import assert_same_run, trainer, unlock

from txl import graphs
from txl.errors import TxlError
from txl.model import adaptive
from txl.text.corpus import Corpus
from txl.training.trainer import Trainer
from txl.training.update import why_not_graphs
from txl_kernels import checks

NO_DROPOUT = {"dropout": 0.0, "attn_dropout": 0.0}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """A list of runs whose tensors a recorded graph may read."""
    known: list[Trainer] = []

    def static() -> list[Tensor]:
        found = []
        for run in known:
            (optimizer,) = run.updater.optimizers
            found += [*run.model.parameters(), *(group["lr"] for group in optimizer.param_groups)]
            found += [x for state in optimizer.state.values() for x in state.values()]
            found += [p.grad for p in run.model.parameters() if p.grad is not None]
        return found

    monkeypatch.setattr(graphs, "is_capturable", lambda device: True)
    monkeypatch.setattr(graphs, "capture", recorded(static))
    # Values that a GPU's calls do not read.
    monkeypatch.setattr(checks, "check_bound_values", lambda call: None)
    monkeypatch.setattr(adaptive, "check_targets", lambda targets, vocab_size: None)
    return known


def advanced(run: Trainer, updates: int, in_graphs: bool) -> dict[str, Tensor]:
    """Return all state after a number of updates."""
    if not in_graphs:
        run.updater.graphs = None
    run.advance(updates)
    assert (run.updater.graphs is not None and run.updater.graphs._gradients is not None) == in_graphs
    tensors = {name: p.detach() for name, p in run.model.named_parameters()}
    return tensors | run.updater.state_dict() | run.batches.state_dict() | {"rng": torch.get_rng_state()}


@pytest.mark.parametrize("options", [
    {}, {"weight_decay": 0.1, "warmup": 5}, {"precision": "bf16"}, {"model": {"mem_len": 0}},
    {"model": {"encoding": "shaw", "table_len": 12, "mem_len": 24}}, {"model": NO_DROPOUT | {"initial_memory": "zeros"}},
], ids=str)  # fmt: skip
def test_updates_in_graphs_equal_eager_ones(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], options: dict[str, object]
) -> None:
    """Parameters, moments, memory and random numbers over two epochs with dropout."""
    found = []
    for in_graphs in (True, False):
        run = trainer(tmp_path / str(in_graphs), corpus, steps=40, batch=64, **options)
        assert run.batches.streams.segments < 20
        runs[:] = [run]
        found.append(advanced(run, 40, in_graphs))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_resumed_run_may_change_to_graphs(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are the same in both directions."""
    options = {"steps": 30, "batch": 64, "eval_every": 30, "save_every": 15, "eval_tokens": 64}

    def part(folder: Path, until: int, resume: bool, in_graphs: bool) -> None:
        with monkeypatch.context() as patched:
            run = trainer(folder, corpus, resume=resume, **options)
            runs[:] = [run]
            if not in_graphs:
                run.updater.graphs = None
            run.advance(until - run.step)
            assert (run.updater.graphs is not None and run.updater.graphs._gradients is not None) == in_graphs
            patched.setenv("TXL_CUDA_GRAPHS", "off")  # of validation
            run.save() if until < 30 else run._evaluate(None)
            run.save()
        unlock(folder)

    part(tmp_path / "straight", 30, False, False)
    for name, order in (("a", (False, True)), ("b", (True, False))):
        part(tmp_path / name, 15, False, order[0])
        part(tmp_path / name, 30, True, order[1])
        assert_same_run(tmp_path / "straight", tmp_path / name)


def test_non_finite_loss_ends_a_run_in_graphs(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    run = trainer(tmp_path, corpus, batch=64, steps=30)
    runs.append(run)
    run.advance(14)
    assert run.updater.graphs._gradients is not None
    with torch.no_grad():
        run.model.softmax.bias.fill_(torch.nan)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    with pytest.raises(TxlError, match="the loss became nan at step 15"):
        run.advance(1)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("options", "reason"), [
    ({"accumulate": 2}, "accumulate is 2"), ({"batch_chunk": 2}, "batch_chunk is 2"), ({"average": "ema"}, "'ema'"),
    ({"recompute": True}, "recompute is True"), ({"ext_len": 4}, "context is 4"), ({"optimizer": "muon"}, "'muon'"),
    ({"intermediate_losses": True}, "intermediate_losses"), ({"model": {"second_target": True}}, "second softmax"),
    ({"model": {"cutoffs": (10, 20)}}, "several bins"), ({"model": {"network": "lstm"}}, "RecurrentNetwork"),
], ids=str)  # fmt: skip
def test_updates_that_run_without_graphs(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], options: dict[str, object], reason: str
) -> None:
    updater = trainer(tmp_path, corpus, **options).updater
    assert updater.graphs is None
    assert reason in why_not_graphs(updater.network, updater.config, updater.world, updater.device)
