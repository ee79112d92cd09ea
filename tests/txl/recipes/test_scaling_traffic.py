"""Bytes that the model of scaling says are moved: those that torch moves in a real update."""

import pytest
from fake_worlds import Exchanged, fake_world, reduced_by_ddp, training
from model_helpers import small_config

from txl import recipes
from txl.recipes.scaling import traffic
from txl.recipes.scaling.setup import Setup, padded
from txl.training.config import TrainConfig

# Of a vocabulary in bins, with projections: 7 and 11 divide nothing of it.
SIZES = {"vocab_size": 77, "cutoffs": (20, 50), "div_val": 2, "d_model": 22, "d_head": 11, "d_inner": 30, "n_layer": 3}
OPTIONS = [{}, {"batch_chunk": 2}, {"accumulate": 2}, {"recompute": True}, {"tgt_len": 4, "ext_len": 3}]


def update(setup: Setup) -> Exchanged:
    with fake_world(setup.processes) as world:
        updater, batches = training(setup.model, setup.train, world, setup.shard)
        updater.update(0, batches)
        with Exchanged() as exchanged:
            updater.update(1, batches)
    return exchanged


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("untie_r", [False, True], ids=["tied", "untied"])
def test_a_sharded_update(untie_r: bool, precision: str, options: dict[str, object]) -> None:
    train = TrainConfig(**({"batch": 16, "tgt_len": 8, "precision": precision} | options))
    setup = Setup(small_config(**SIZES, untie_r=untie_r), train, 8, shard=True, bf16=precision == "bf16")
    exchanged = update(setup)
    for kind in ("all_gather", "reduce_scatter"):
        told = [each for each in traffic.collectives(setup) if each.kind == kind]
        assert exchanged.bytes[kind] == sum(each.payload * each.times for each in told)
        assert exchanged.calls[kind] == sum(each.times for each in told)


@pytest.mark.parametrize("processes", [3, 64])
def test_padding(processes: int) -> None:
    model = small_config(**SIZES, untie_r=True)
    setup = Setup(model, TrainConfig(batch=processes, tgt_len=8), processes, shard=True, bf16=False)
    p = setup.parameters
    assert update(setup).bytes["reduce_scatter"] == 4 * p.padded(processes) > 4 * p.count
    assert p.count == p.padded(1) == padded(p.root, 1) + 3 * padded(p.layer, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replicated_update(precision: str, options: dict[str, object]) -> None:
    train = TrainConfig(**({"batch": 16, "tgt_len": 8, "precision": precision} | options))
    setup = Setup(small_config(**SIZES), train, 8, bf16=precision == "bf16")
    with fake_world(8) as world:
        updater, batches = training(setup.model, train, world, shard=False)
        sizes = reduced_by_ddp(updater)
        updater.update(0, batches)
        told = traffic.collectives(setup)
        assert sum(sizes) == sum(each.payload * each.times for each in told) == 4 * setup.parameters.count


def test_buckets_are_ddps() -> None:
    with fake_world(2) as world:
        updater, _ = training(small_config(), TrainConfig(batch=2, tgt_len=8), world, shard=False)
        assert updater.parallel.module.bucket_bytes_cap == traffic.BUCKET


def test_a_tied_table_comes_last() -> None:
    """So nothing is left to compute while it is summed; buckets are in order from the second update
    on."""
    model = small_config(vocab_size=20_000, d_model=128, d_inner=2048)
    with fake_world(8) as world:
        updater, batches = training(model, TrainConfig(batch=8, tgt_len=8), world, shard=False)
        sizes = reduced_by_ddp(updater)
        for step in range(2):
            sizes.clear()
            updater.update(step, batches)
    early, late = traffic.collectives(Setup(model, TrainConfig(batch=8, tgt_len=8), 8))
    assert (early.late, late.late) == (False, True)
    assert len(sizes) > 1
    assert late.payload <= sizes[-1] < late.payload + traffic.BUCKET  # with what its bucket still held


def test_what_a_process_sends() -> None:
    """Of a ring through n: a sum takes 2 (n - 1) steps, the others n - 1, of a part in n each."""
    for processes in (2, 8, 64):
        part = 1000 / processes
        sent = {kind: traffic.Collective(kind, 1000, 1).sent(processes) for kind in ("all_reduce", "all_gather")}
        assert sent["all_gather"] == pytest.approx((processes - 1) * part)
        assert sent["all_reduce"] == pytest.approx(2 * (processes - 1) * part)
    alone = recipes.load("wt103-large")
    assert traffic.sent(Setup(alone.model_config(), alone.train_config())) == 0
