"""A sharded run of one process: its numbers and checkpoints; of more: tests/txl/distributed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from training_helpers import trainer

from txl.distributed.join import joined
from txl.distributed.world import World
from txl.errors import TxlError
from txl.text.corpus import Corpus
from txl.training import checkpoint as checkpoints
from txl.training import shard_writer
from txl.training.last import find_last
from txl.training.lock import unlock


@pytest.fixture(autouse=True)
def group() -> Iterator[World]:
    with joined(torch.device("cpu"), always=True) as world:
        yield world


def whole_parameters(t: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in t.updater.whole(t.model).named_parameters()}


def test_a_checkpoint_is_of_the_moment_it_was_begun(corpus: Corpus, tmp_path: Path) -> None:
    """Training goes on while it is written."""
    t = trainer(tmp_path / "run", corpus, shard=True, average="ema")
    t.advance(3)
    wanted, memory = whole_parameters(t), [x.clone() for x in t.batches.memories[0] or ()]
    t.save(wait=False)
    t.advance(2)
    t.save()
    assert [path.name for path in (tmp_path / "run").glob("last*")] == ["last-5"]
    again = trainer(tmp_path / "again", corpus, shard=True, average="ema")
    again.advance(3)
    again.save(wait=False)
    again.advance(2)
    again.keeper._wait()
    saved = checkpoints.load(tmp_path / "again" / "last-3")
    assert saved.state["step"] == 3
    assert all(torch.equal(saved.tensors[f"model.{name}"], p) for name, p in wanted.items())
    assert all(torch.equal(saved.tensors[f"memory.0.{i}"], x) for i, x in enumerate(memory))


def test_the_same_step_is_written_beside_and_then_in_the_place_of(corpus: Corpus, tmp_path: Path) -> None:
    """There is no moment without a whole checkpoint."""
    t = trainer(tmp_path / "run", corpus, shard=True)
    t.advance(2)
    for name in ("last-2", "last-2.1", "last-2.2"):
        t.save()
        assert [path.name for path in (tmp_path / "run").glob("last*")] == [name]
        assert t.last.name == name
    (tmp_path / "run" / "last-2").mkdir()  # of no use, and older
    assert find_last(tmp_path / "run") == tmp_path / "run" / "last-2.2"
    unlock(tmp_path / "run")
    again = trainer(tmp_path / "run", corpus, shard=True, resume=True)
    assert again.step == 2


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tmp_path / "run", corpus, shard=True)
    t.advance(1)
    t.save()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_writer, "commit", full)
    t.advance(1)
    t.save(wait=False)  # nobody has looked yet
    with pytest.raises(TxlError, match=r"last-2: the checkpoint cannot be written: .*No space left.* untouched"):
        t.save()
    assert find_last(tmp_path / "run") == tmp_path / "run" / "last-1"
    assert checkpoints.load(tmp_path / "run").state["step"] == 1


def test_a_torch_without_shards_is_named(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = trainer(tmp_path / "run", corpus, shard=True)
    t.advance(1)
    t.save()
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.hf_storage", None)
    with pytest.raises(TxlError, match=r"last-1: a checkpoint in shards needs a torch that .* this is \d"):
        checkpoints.load(tmp_path / "run")
    with pytest.raises(TxlError, match=r"--shard needs a torch that .* this is \d"):
        trainer(tmp_path / "other", corpus, shard=True)


def test_it_computes_in_bfloat16_and_keeps_float32(corpus: Corpus, tmp_path: Path) -> None:
    """Gathered parameters are bfloat16, the optimizer's are not; nearly the losses of autocast."""
    options = {"precision": "bf16", "recompute": True, "model": {"dropout": 0.0, "attn_dropout": 0.0, "untie_r": True}}
    plain = trainer(tmp_path / "plain", corpus, **options)
    wanted = [plain._update().loss for _ in range(10)]
    t = trainer(tmp_path / "run", corpus, shard=True, **options)
    seen: set[torch.dtype] = set()
    t.model.layers[0].feed_forward.register_forward_pre_hook(lambda m, args: seen.add(m[0].weight.dtype))
    got = [t._update().loss for _ in range(10)]
    assert seen == {torch.bfloat16}
    assert got == pytest.approx(wanted, rel=1e-2)
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}
    assert all(isinstance(p, DTensor) for p in t.model.parameters())
    assert {x.dtype for x in t.batches.memories[0] or ()} == {torch.bfloat16}


def test_the_best_checkpoint_is_whole(corpus: Corpus, tmp_path: Path) -> None:
    t = trainer(tmp_path / "run", corpus, shard=True, steps=10, average="ema")
    t.run()
    best = checkpoints.load(t.best)
    average = t.updater.average.module
    assert average is not None
    for name, p in t.updater.whole(average).named_parameters():
        assert torch.equal(best.tensors[f"model.{name}"], p)
    plain = trainer(tmp_path / "plain", corpus, steps=10, average="ema")
    plain.run()
    assert plain.best_loss == pytest.approx(t.best_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
def test_compiled_layers_can_be_sharded(corpus: Corpus, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": {"dropout": 0.0, "attn_dropout": 0.0, "untie_r": True}}
    plain = trainer(tmp_path / "plain", corpus, **options)
    wanted = [plain._update().loss for _ in range(6)]
    t = trainer(tmp_path / "run", corpus, shard=True, compile=True, **options)
    assert [t._update().loss for _ in range(6)] == pytest.approx(wanted, rel=1e-4)
