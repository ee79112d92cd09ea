"""Memory that a device needs by the model of scaling: that of real updates, as torch tracks it."""

import warnings

import pytest
import torch
from fake_worlds import fake_world, training
from model_helpers import small_config
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from txl.distributed.world import World
from txl.errors import TxlError
from txl.model.transformer import Block
from txl.recipes.scaling import activations, memory
from txl.recipes.scaling.setup import Setup
from txl.training.config import TrainConfig

SIZES = {"n_layer": 4, "d_model": 64, "d_head": 32, "d_inner": 256, "dropout": 0.1, "vocab_size": 50}


def setup_of(
    bf16: bool, *, processes: int = 1, shard: bool = False, model: dict | None = None, **train: object
) -> Setup:
    options = {"batch": 16, "tgt_len": 32, "precision": "bf16" if bf16 else "fp32"} | train
    return Setup(
        small_config(**(SIZES | (model or {}))), TrainConfig(**options), processes, shard=shard, bf16=bf16,
        mask=2 if bf16 else 4,
    )  # fmt: skip


def saved_by_layer(setup: Setup) -> tuple[int, int]:
    """Bytes of distinct storages that a layer keeps for backward, but for its parameters and its
    memory: (of what rows and positions made, of casts of parameters)."""
    m, t = setup.model, setup.train
    block = Block(m, None).train()
    block.recompute = t.recompute
    sizes = {tuple(p.shape) for p in block.parameters()}
    hidden = torch.randn(setup.chunk, setup.length, m.d_model, requires_grad=True)
    past = torch.randn(setup.chunk, m.mem_len, m.d_model, dtype=torch.bfloat16 if setup.bf16 else torch.float32)
    known = {x.untyped_storage().data_ptr() for x in (past, *block.parameters())} | {0}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16):
        positions = block.attention.positions(setup.length, m.mem_len)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            block(hidden, past, positions)
    if setup.bf16 is False or t.recompute:  # the same for all layers
        known.add(positions.untyped_storage().data_ptr())
    found = [x for place, x in kept.items() if place not in known]
    casts = [x for x in found if tuple(x.shape) in sizes or tuple(x.shape[::-1]) in sizes]
    total = sum(x.untyped_storage().nbytes() for x in found)
    of_casts = sum(x.untyped_storage().nbytes() for x in casts)
    return total - of_casts, of_casts


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("model", [{}, {"dropout": 0.0}, {"mem_len": 90, "attn_dropout": 0.2, "n_head": 3}], ids=str)
def test_what_a_layer_keeps_for_backward(bf16: bool, recompute: bool, model: dict[str, object]) -> None:
    setup = setup_of(bf16, model=model, batch=6, batch_chunk=2, tgt_len=13, recompute=recompute)
    made, casts = saved_by_layer(setup)
    assert made == activations.kept_by_layer(setup)
    assert casts == (0 if recompute else activations.layer_casts(setup))


def test_a_layer_keeps_no_scores() -> None:
    """Measured, not predicted: twice the memory adds twice as much, and less than scores would."""
    setups = [setup_of(True, model={"mem_len": n, "n_head": 8}, batch=1, tgt_len=500) for n in (512, 1024, 2048)]
    kept = [saved_by_layer(setup)[0] for setup in setups]
    assert kept[2] - kept[1] == 2 * (kept[1] - kept[0])
    scores = 2 * 8 * 500 * (2048 + 500)
    assert kept[2] < scores / 2


@pytest.mark.parametrize("processes", [3, 8, 64])
@pytest.mark.parametrize("untie_r", [False, True], ids=["tied", "untied"])
def test_sharded_parameters_gradients_and_adam(untie_r: bool, processes: int) -> None:
    setup = setup_of(True, processes=processes, shard=True, model={"untie_r": untie_r, "n_layer": 2}, batch=processes)
    with fake_world(processes) as world:
        updater, batches = training(setup.model, setup.train, world, shard=True)
        updater.update(0, batches)
        parameters = list(updater.network.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        held = sum(p.to_local().untyped_storage().nbytes() for p in parameters if p.to_local().numel())
        state = updater.optimizers[0].state
        moments = sum(state[p][name].to_local().nbytes for p in parameters for name in ("exp_avg", "exp_avg_sq"))
        shards = sum(p.to_local().nbytes for p in parameters)
    told = memory.device_memory(setup)
    assert moments == 2 * shards
    # The first process has a whole part of each, so nothing is filled up.
    assert told.parameters == shards == held
    assert told.optimizer == 2 * told.gradients == moments


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"batch_chunk": 4}], ids=str)
def test_memory_of_hidden_states(bf16: bool, options: dict[str, object]) -> None:
    setup = setup_of(bf16, processes=2, shard=True, model={"mem_len": 40}, **options)
    with fake_world(2) as world:
        updater, batches = training(setup.model, setup.train, world, shard=True)
        for step in range(3):
            updater.update(step, batches)
    held = [x for each in batches.memories for x in each or ()]
    assert sum(x.nbytes for x in held) == memory.hidden_states(setup)


PEAKS = [
    {}, {"mem_len": 96}, {"vocab_size": 5000}, {"vocab_size": 5000, "cutoffs": (1000, 2000)},
    {"recompute": True}, {"mem_len": 96, "recompute": True},
]  # fmt: skip


def peak(setup: Setup, world: World) -> int:
    """Of an update with its memory full, by torch's tracker of every tensor."""
    updater, batches = training(setup.model, setup.train, world, setup.shard)
    for step in range(4):
        updater.update(step, batches)
    tracker = MemTracker()
    held = [x for each in batches.memories for x in each or ()]
    tracker.track_external(updater.network, *updater.optimizers, *held)
    with warnings.catch_warnings(), tracker:
        warnings.simplefilter("ignore")  # the tracker's own
        updater.update(4, batches)
    found: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return found


@pytest.mark.parametrize("options", PEAKS, ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_peak_of_an_update(bf16: bool, options: dict[str, object]) -> None:
    """Predicted is a little more than is needed: gradients are there from the start."""
    train = {name: value for name, value in options.items() if name == "recompute"}
    setup = setup_of(bf16, model={k: v for k, v in options.items() if k not in train}, **train)
    assert 0.94 < memory.device_memory(setup).total / peak(setup, World()) < 1.2


@pytest.mark.parametrize("options", [{}, {"mem_len": 96, "recompute": True}], ids=str)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("untie_r", [False, True], ids=["tied", "untied"])
def test_the_peak_of_a_sharded_update(untie_r: bool, bf16: bool, options: dict[str, object]) -> None:
    """On a CPU norms are in bfloat16, too, which autocast on a GPU computes in float32."""
    train = {name: value for name, value in options.items() if name == "recompute"}
    model = {"untie_r": untie_r, "d_model": 128} | {k: v for k, v in options.items() if k not in train}
    setup = setup_of(bf16, processes=8, shard=True, model=model, **train)
    with fake_world(8) as world:
        assert 1 < memory.device_memory(setup).total / peak(setup, world) < (1.4 if untie_r else 1.15)


@pytest.mark.parametrize("options", [{"batch": 15}, {"batch_chunk": 4}], ids=str)
def test_what_the_batch_refuses_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(TxlError, match=r"batch 1[56] is no multiple of 8 x"):
        setup_of(True, processes=8, **options)
    with fake_world(8) as world, pytest.raises(TxlError, match="batch must be a multiple"):
        training(small_config(**SIZES), TrainConfig(**({"batch": 16, "tgt_len": 32} | options)), world, shard=False)
