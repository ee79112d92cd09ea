"""Times of the model of scaling: what they are made of, as torch counts it, and their limits."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_worlds import batches_of
from model_helpers import small_config
from torch.utils._python_dispatch import TorchDispatchMode

from txl import TransformerXL, recipes
from txl.distributed.world import World
from txl.recipes.cost import training_cost
from txl.recipes.scaling import hardware, search, step_time
from txl.recipes.scaling.hardware import H200
from txl.recipes.scaling.setup import Setup
from txl.recipes.scaling.tables import setup as of_recipe
from txl.recipes.scaling.traffic import Collective
from txl.training.config import TrainConfig
from txl.training.losses import segment_loss

# Nothing is computed. A CPU's dropout is four operations, an empty one among them; a GPU's is one.
NO_WORK = {
    "view",
    "t",
    "transpose",
    "detach",
    "slice",
    "permute",
    "expand",
    "_unsafe_view",
    "split",
    "alias",
    "empty_like",
}
NO_WORK |= {"unsqueeze", "squeeze", "as_strided", "unbind", "select", "bernoulli_", "div_"}


class Launched(TorchDispatchMode):
    """Counts operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in NO_WORK:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("options", [{}, {"cutoffs": (10, 20)}, {"cutoffs": (10, 20), "div_val": 2}], ids=str)
def test_operations_that_the_host_launches(options: dict[str, object], recompute: bool) -> None:
    model = small_config(n_layer=6, dropout=0.1, attn_dropout=0.1, **options)
    network = TransformerXL(model).train()
    for block in network.layers:
        block.recompute = recompute
    memory = None
    for _ in range(2):
        with Launched() as launched:
            tokens = torch.randint(31, (2, 8))
            with torch.autocast("cpu", torch.bfloat16):
                loss = segment_loss(network, tokens, tokens, memory)
            loss.total.backward()
        memory = tuple(x.bfloat16() for x in loss.memory)
    setup = Setup(model, TrainConfig(batch=2, tgt_len=8, recompute=recompute))
    assert step_time.launched(setup) == pytest.approx(launched.counts.total(), rel=0.1)


@pytest.mark.parametrize("name", ["wt103-large", "enwik8-large", "lm1b-large"])
def test_operations_are_those_of_the_whole_training(name: str) -> None:
    recipe = recipes.load(name)
    whole = training_cost(recipe.model_config(), recipe.train_config()).total / recipe.train_config().steps
    assert step_time.operations(of_recipe(name)) == pytest.approx(whole)
    # Of 8 processes each projects the positions anew.
    assert 8 * step_time.operations(of_recipe(name, 8)) == pytest.approx(whole, rel=0.02)
    again = replace(of_recipe(name), train=replace(of_recipe(name).train, recompute=True))
    assert 1.2 < step_time.operations(again) / whole <= 4 / 3


def test_a_ring_and_a_tree_have_nccls_steps() -> None:
    one = hardware.Latency(0.0, 1.0, 0.0), hardware.Latency(0.0, 0.0, 1.0)
    assert [hardware.steps(64, 8, each, tree=False) for each in one] == [56, 7]
    assert [hardware.steps(64, 8, each, tree=True) for each in one] == [7, 3]
    assert [hardware.steps(8, 8, each, tree=False) for each in one] == [7, 0]
    assert H200.across(8, 8) == 450e9
    assert H200.across(16, 8) == H200.across(1024, 8) == 400e9


def test_an_exchange_is_bytes_and_steps() -> None:
    setup = of_recipe("enwik8-large", 64)
    free = replace(H200, ring=hardware.Latency(0, 0, 0), tree=hardware.Latency(0, 0, 0))
    gather = Collective("all_gather", 400 * 10**9, 3)
    assert step_time.exchange_time(gather, setup, free) == pytest.approx(3 * 63 / 64)
    assert step_time.exchange_time(gather, setup, H200) - 3 * 63 / 64 == pytest.approx(
        3 * (10 + 56 * 1.9 + 7 * 4) * 1e-6
    )


@pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
def test_only_what_computing_covers_is_free(shard: bool) -> None:
    setup = replace(of_recipe("wt103-large-tf", 64), shard=shard)
    slow, quick = (step_time.step_time(setup, replace(H200, used=used)) for used in (0.001, 0.4))
    assert slow.exchanged == quick.exchanged
    assert slow.waited < quick.waited <= quick.exchanged  # the root's stays
    assert 0 < slow.waited == min(slow.waited, step_time.step_time(setup, replace(H200, used=1e-5)).waited)
    assert quick.total == pytest.approx(max(quick.products, quick.launches) + quick.optimizer + quick.waited)


def test_the_longest_memory_is() -> None:
    setup = of_recipe("enwik8-large", 8, 1)
    length = search.longest_memory(setup, H200)
    fitting, beyond = (replace(setup, model=replace(setup.model, mem_len=n)) for n in (length, length + 1024))
    assert search.fits(fitting, H200)
    assert not search.fits(beyond, H200)


def test_a_batch_that_keeps_gpus_busy() -> None:
    setup = of_recipe("enwik8-large", 64)
    rows = search.rows_for(setup, H200, 0.8)
    assert rows is not None
    enough, fewer = (search.best(search.grown(setup, n), H200)[1].efficiency for n in (rows, rows // 2))
    assert fewer < 0.8 <= enough
    assert search.rows_for(setup, replace(H200, launch=1.0), 0.8) is None
    chunked = search.chunked(of_recipe("wt103-large", 1, 1024), H200)
    assert (chunked.train.batch_chunk, chunked.chunk) == (8, 128)


@pytest.mark.parametrize("batch", [22, 60, 64, 512])
def test_rows_are_dealt_as_training_deals_them(batch: int) -> None:
    train = TrainConfig(batch=batch, tgt_len=8)
    for most in (8, 64, 1024):
        size = search.largest_world(batch, most)
        for rank in {0, size // 2, size - 1}:
            rows = batches_of(small_config(), train, World(rank, size)).rows
            assert rows.stop - rows.start == Setup(small_config(), train, size).rows
        assert all(batch % more for more in range(size + 1, most + 1))
