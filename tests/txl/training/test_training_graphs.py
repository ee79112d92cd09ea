"""Updates in CUDA graphs equal those that Python issues (by a recorder; on a device in
test_training_device.py)."""

import copy
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import recorded
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from training_helpers import assert_same_run, trainer, unlock

from txl import graphs
from txl.errors import TxlError
from txl.model import adaptive
from txl.model.config import ModelConfig
from txl.text import corpus as data
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer
from txl.training.update_graphs import IN_GRAPHS, NEEDS_DEFAULT, why_not_graphs
from txl_kernels import checks

# torch 2.6 does not tell whether hooks of saved tensors are active.
TELLS_HOOKS = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch 2.6"
)
HAS_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9's optimizer")
NO_DROPOUT = {"dropout": 0.0, "attn_dropout": 0.0}


@pytest.fixture(scope="module")
def corpus(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A short text: an epoch of 16 streams has ten segments, the last one short."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "text.txt").write_text(text.read_text()[:2700])
    return data.prepare(folder / "text.txt", folder / "corpus")


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

    monkeypatch.setattr(graphs, "WARM_UP", 2)  # updates, after two that fill the memory
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
        run = trainer(tmp_path / str(in_graphs), corpus, steps=20, batch=16, **options)
        assert run.batches.streams.segments == 10
        runs[:] = [run]
        found.append(advanced(run, 20, in_graphs))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_resumed_run_may_change_to_graphs(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are the same in both directions."""
    options = {"steps": 16, "batch": 16, "eval_every": 16, "save_every": 8, "eval_tokens": 64}

    def part(folder: Path, until: int, resume: bool, in_graphs: bool) -> None:
        with monkeypatch.context() as patched:
            run = trainer(folder, corpus, resume=resume, **options)
            runs[:] = [run]
            if not in_graphs:
                run.updater.graphs = None
            run.advance(until - run.step)
            assert (run.updater.graphs is not None and run.updater.graphs._gradients is not None) == in_graphs
            patched.setenv("TXL_CUDA_GRAPHS", "off")  # of validation
            run.save() if until < 16 else run._evaluate(None)
            run.save()
        unlock(folder)

    part(tmp_path / "straight", 16, False, False)
    for name, order in (("a", (False, True)), ("b", (True, False))):
        part(tmp_path / name, 8, False, order[0])
        part(tmp_path / name, 16, True, order[1])
        assert_same_run(tmp_path / "straight", tmp_path / name)


def test_non_finite_loss_ends_a_run_in_graphs(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    run = trainer(tmp_path, corpus, steps=30, eval_every=30)
    runs.append(run)
    run.advance(6)
    assert run.updater.graphs._gradients is not None
    with torch.no_grad():
        run.model.softmax.bias.fill_(torch.nan)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    with pytest.raises(TxlError, match="the loss became nan at step 7"):
        run.advance(1)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("options", "reason"), [
    ({"accumulate": 2}, "accumulate is 2"), ({"batch_chunk": 2}, "batch_chunk is 2"), ({"average": "ema"}, "'ema'"),
    ({"recompute": True}, "recompute is True"), ({"ext_len": 4}, "ext_len is 4"),
    pytest.param({"optimizer": "muon"}, "'muon'", marks=HAS_MUON),
    ({"loss": "half"}, "loss is 'half'"),
    ({"intermediate_losses": True}, "intermediate_losses"), ({"model": {"second_target": True}}, "second_target is True"),
    ({"model": {"cutoffs": (10, 20)}}, "cutoffs is (10, 20)"), ({"model": {"network": "lstm"}}, "RecurrentNetwork"),
], ids=str)  # fmt: skip
def test_updates_that_run_without_graphs(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], options: dict[str, object], reason: str
) -> None:
    updater = trainer(tmp_path, corpus, **options).updater
    assert updater.graphs is None
    assert reason in why_not_graphs(updater.network, updater.config, updater.world, updater.device)


def test_every_option_is_known_to_graphs() -> None:
    """A new option of training or of a model must be put into one of both lists."""
    names = {field.name for config in (TrainConfig, ModelConfig) for field in dataclasses.fields(config)}
    assert NEEDS_DEFAULT.keys() | IN_GRAPHS == names
    assert not NEEDS_DEFAULT.keys() & IN_GRAPHS


def two_runs(tmp_path: Path, corpus: Corpus, runs: list[Trainer], batch: int = 4) -> tuple[Trainer, Trainer]:
    """Return a run in graphs and an eager one."""
    replayed, eager = (
        trainer(tmp_path / name, corpus, steps=90, batch=batch, eval_every=90, save_every=90, model=NO_DROPOUT)
        for name in ("replayed", "eager")
    )
    eager.updater.graphs = None
    runs[:] = [replayed]
    return replayed, eager


def advance_both(replayed: Trainer, eager: Trainer, updates: int) -> None:
    """Do updates in both runs, from the same random numbers, and compare all parameters."""
    seed = replayed.step
    for run in (replayed, eager):
        torch.manual_seed(seed)
        run.advance(updates)
    pairs = zip(replayed.model.named_parameters(), eager.model.parameters(), strict=True)
    assert [name for (name, p), q in pairs if not torch.equal(p, q)] == []


def is_captured(run: Trainer) -> bool:
    return run.updater.graphs._gradients is not None


def freeze(run: Trainer) -> None:
    run.model.softmax.bias.requires_grad_(False)


def replace_storage(run: Trainer) -> None:
    for p in run.model.parameters():
        p.data = p.data.clone()


def load_optimizer(run: Trainer) -> None:
    (optimizer,) = run.updater.optimizers
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def set_option(name: str, value: object) -> Callable[[Trainer], None]:
    def change(run: Trainer) -> None:
        for group in run.updater.optimizers[0].param_groups:
            group[name] = value

    return change


def clip(run: Trainer) -> None:
    run.updater.config = dataclasses.replace(run.updater.config, clip=1e-6)


def drop_more(run: Trainer) -> None:
    for module in run.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


def set_window(run: Trainer) -> None:
    for block in run.model.layers:
        block.attention.window = 4


def replace_module(run: Trainer) -> None:
    run.model.layers[1].feed_forward[1] = torch.nn.Tanh()


def replace_forward(run: Trainer) -> None:
    run.model.layers[1].feed_forward.forward = lambda x: 2 * x


@pytest.mark.parametrize("change", [
    freeze, replace_storage, load_optimizer, set_option("betas", (0.0, 0.5)), set_option("eps", 1.0),
    set_option("weight_decay", 0.5), clip, drop_more, set_window, replace_module,
])  # fmt: skip
def test_what_changes_after_the_capture_acts(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], change: Callable[[Trainer], None]
) -> None:
    """The graphs are dropped, and captured again after the warm-up."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    advance_both(replayed, eager, 6)
    assert is_captured(replayed)
    for run in (replayed, eager):
        change(run)
    advance_both(replayed, eager, 1)
    assert not is_captured(replayed)
    advance_both(replayed, eager, 4)
    assert is_captured(replayed)


def test_a_replaced_forward_ends_graphs(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    replayed, eager = two_runs(tmp_path, corpus, runs)
    advance_both(replayed, eager, 6)
    for run in (replayed, eager):
        replace_forward(run)
    advance_both(replayed, eager, 4)
    assert not is_captured(replayed)


def test_hooks_of_the_optimizer_are_called(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    """Both its own and those of all optimizers; the graphs stay for the updates after their
    removal."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    advance_both(replayed, eager, 6)
    calls: list[object] = []
    for register in (
        replayed.updater.optimizers[0].register_step_pre_hook, replayed.updater.optimizers[0].register_step_post_hook,
        register_optimizer_step_post_hook,
    ):  # fmt: skip
        handle = register(lambda optimizer, *_: calls.append(optimizer))
        replayed.advance(2)
        handle.remove()
    assert calls.count(replayed.updater.optimizers[0]) == 6
    eager.advance(6)
    graph = replayed.updater.graphs._gradients
    advance_both(replayed, eager, 2)
    assert graph is replayed.updater.graphs._gradients is not None


def test_a_replaced_step_of_the_optimizer_is_called(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    """torch's schedulers replace it on the instance."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    advance_both(replayed, eager, 6)
    (optimizer,) = replayed.updater.optimizers
    step, calls = optimizer.step, []
    optimizer.step = lambda: calls.append(optimizer) or step()
    advance_both(replayed, eager, 4)
    assert len(calls) == 4
    assert not is_captured(replayed)


@pytest.mark.parametrize(("free", "allocated", "is_short"), [(4, 5, True), (5, 5, False), (1, 1, False), (1, 2, True)])
def test_memory_is_short_where_a_step_does_not_fit_beside_the_graphs(
    free: int, allocated: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs keep 5 of 10 reserved bytes, which steps without them cannot use."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    assert graphs.is_short_of_memory(torch.device("cuda"), 5) == is_short
    assert not graphs.is_short_of_memory(torch.device("cpu"), 5)


def test_gradients_that_are_left_are_added_to(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    """Before the capture, and after it."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    for _ in range(3):
        advance_both(replayed, eager, 3)
        for run in (replayed, eager):
            for p in run.model.parameters():
                p.grad = torch.full_like(p, 1e-3)
    advance_both(replayed, eager, 2)
    assert is_captured(replayed)


@pytest.mark.parametrize("context", [
    lambda: torch.autograd.set_detect_anomaly(True),
    pytest.param(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), marks=TELLS_HOOKS),
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
], ids=["anomaly", "saved tensors", "autocast"])  # fmt: skip
def test_what_acts_on_operations_of_python_runs_without_graphs(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed, eager = two_runs(tmp_path, corpus, runs)
    with context():
        advance_both(replayed, eager, 6)
    assert not is_captured(replayed)
    advance_both(replayed, eager, 4)
    graph, calls = replayed.updater.graphs._gradients, []
    assert graph is not None
    loss = type(replayed.updater).loss
    monkeypatch.setattr(type(replayed.updater), "loss", lambda self, *x: calls.append(self) or loss(self, *x))
    with context():
        advance_both(replayed, eager, 2)
    assert calls.count(replayed.updater) == 2
    advance_both(replayed, eager, 2)
    assert calls.count(replayed.updater) == 2
    assert replayed.updater.graphs._gradients is graph


@pytest.mark.parametrize("failing", [1, 2], ids=["gradients", "optimizer"])
def test_after_a_failed_capture_updates_go_on(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], failing: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Gradients that the capture computed before its error are not added to those of an update."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    captures, capture = [], graphs.capture

    def fails(function: Callable[..., Any], *others: Any) -> Any:
        captures.append(function)
        if len(captures) < failing:
            return capture(function, *others)
        capture(function, *others)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "capture", fails)
    advance_both(replayed, eager, 6)
    assert not is_captured(replayed)
    assert len(captures) == failing
    assert [x.getMessage() for x in caplog.records if "goes on without" in x.getMessage()] == [
        "training goes on without CUDA graphs: a capture failed with OutOfMemoryError: CUDA out of memory"
    ]


def test_an_update_that_raised_leaves_no_gradients(tmp_path: Path, corpus: Corpus, runs: list[Trainer]) -> None:
    """Neither in graphs nor without, so the next one is that of the repaired parameters."""
    replayed, eager = two_runs(tmp_path, corpus, runs)
    for updates in (3, 4):  # before the capture, and after it
        advance_both(replayed, eager, updates)
        for run in (replayed, eager):
            bias = run.model.softmax.bias
            kept = bias.detach().clone()
            bias.detach().fill_(torch.nan)
            with pytest.raises(TxlError, match="the loss became nan"):
                run.advance(1)
            bias.detach().copy_(kept)
            assert all(p.grad is None for p in run.model.parameters())
        advance_both(replayed, eager, 2)
    assert is_captured(replayed)


def test_a_run_that_is_changed_again_and_again_stays_eager(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    replayed, eager = two_runs(tmp_path, corpus, runs)
    for n in range(graphs.MAX_DROPS + 2):
        advance_both(replayed, eager, 6)
        assert is_captured(replayed) == (n <= graphs.MAX_DROPS)
        for run in (replayed, eager):
            set_option("eps", 1e-8 * (n + 2))(run)
    assert [x.getMessage() for x in caplog.records if "goes on without" in x.getMessage()] == [
        "training goes on without CUDA graphs: the model was changed too often"
    ]


def test_graphs_are_dropped_where_memory_is_short(
    tmp_path: Path, corpus: Corpus, runs: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an epoch's eager updates, and captured again, as often as there are epochs."""
    monkeypatch.setattr(graphs, "is_short_of_memory", lambda device, nbytes: True)
    replayed, eager = two_runs(tmp_path, corpus, runs, batch=16)
    states = []
    for _ in range((graphs.MAX_DROPS + 1) * replayed.batches.streams.segments):
        advance_both(replayed, eager, 1)
        states.append(is_captured(replayed))
    assert sum(a and not b for a, b in pairwise(states)) == graphs.MAX_DROPS + 1  # at the short segment of each epoch
