"""Memory of hidden states on the host: the same training, with one layer's memory on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from training_helpers import trainer

from txl.errors import TxlError
from txl.model.host_memory import HostStates
from txl.model.memory import on_device, remember
from txl.text.corpus import Corpus
from txl.training.trainer import Trainer

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks, segments": {"batch_chunk": 2, "accumulate": 2},
    "context": {"ext_len": 8},
    "shorter than a segment": {"model": {"mem_len": 7}},
    "longer than what is read": {"model": {"mem_len": 500}},
    "zeros": {"model": {"initial_memory": "zeros"}},
    "pre-norm": {"model": {"pre_norm": True}},
    "bfloat16": {"precision": "bf16"},
    "compiled": {"compile": True},
}


def losses(t: Trainer, updates: int) -> list[float]:
    return [t._update().loss for _ in range(updates)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "compiled" else n for n in CASES])
def test_the_place_of_memory_changes_nothing(corpus: Corpus, tmp_path: Path, name: str) -> None:
    """With dropout, which is drawn again in backward, bit for bit."""
    case = {"recompute": True, "steps": 20} | CASES[name]
    torch._dynamo.reset()  # or one of the two is past the compiler's limit, and draws otherwise
    near = trainer(tmp_path / "near", corpus, **case)
    wanted = losses(near, 8)
    torch._dynamo.reset()
    far = trainer(tmp_path / "far", corpus, offload_memory=True, **case)
    assert losses(far, 8) == wanted
    for a, b in zip(near.batches.memories, far.batches.memories, strict=True):
        assert all(isinstance(x, HostStates) for x in b)
        assert all(torch.equal(x, y.states()) for x, y in zip(a, b, strict=True))


def test_a_run_goes_on_with_its_memory_elsewhere(corpus: Corpus, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", corpus, recompute=True)
    wanted = losses(whole, 6)
    first = trainer(tmp_path / "run", corpus, recompute=True, offload_memory=True)
    got = losses(first, 3)
    first.save()
    got += losses(trainer(tmp_path / "run", corpus, recompute=True, resume=True), 3)
    assert got == wanted


def test_a_ring_is_remember(corpus: Corpus) -> None:
    """States that go round many times, against the function of the paper, in any cut."""
    generator = torch.Generator().manual_seed(0)
    for mem_len, most in ((5, 3), (3, 5), (16, 16), (1, 1), (7, 2)):
        plain: Tensor = torch.randn(2, 1, 4, generator=generator)
        ring = HostStates.of(plain, mem_len, most)
        for n in range(40):
            segment = torch.randn(2, 1 + n % most, 4, generator=generator)
            before = ring.states()
            after = remember(ring, segment, mem_len)
            plain = on_device(remember(plain, segment, mem_len))
            assert isinstance(after, HostStates)
            assert torch.equal(after.states(), plain)
            assert [after.size(i) for i in range(3)] == list(plain.shape)
            assert torch.equal(ring.states(), before)  # backward still reads what was there
            ring = after
    with pytest.raises(ValueError, match="a segment of 9 states does not fit"):
        HostStates.of(torch.zeros(1, 12, 2), 12, 3).extended(torch.zeros(1, 9, 2), 12)


def test_the_device_holds_one_layer_of_it(corpus: Corpus, tmp_path: Path) -> None:
    """Of n layers' memory the device holds n between updates and n more that are being made; from
    the host, one at a time. Counted by torch's own tracker of allocations."""
    n, mem_len = 6, 3000
    sizes = {"model": {"n_layer": n, "mem_len": mem_len}, "batch": 2, "tgt_len": 64, "recompute": True, "steps": 100}
    layer = 2 * mem_len * 16 * 4  # bytes
    peaks = {}
    for offload in (False, True):
        t = trainer(tmp_path / f"{offload}", corpus, offload_memory=offload, **sizes)
        for _ in range(-(-mem_len // 64)):
            t._update()
        memory = t.batches.memories[0]
        assert memory is not None
        assert memory[0].size(1) == mem_len
        held = 0 if offload else sum(on_device(x).untyped_storage().nbytes() for x in memory)
        tracker = MemTracker()
        with tracker:
            t._update()
        peaks[offload] = held + tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peaks[False] - peaks[True] == pytest.approx((2 * n - 1) * layer, rel=0.25)


def test_without_recomputing_there_is_nothing_to_gain(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(TxlError, match="offload_memory needs recompute"):
        trainer(tmp_path, corpus, offload_memory=True)


@pytest.mark.gpu
def test_on_a_gpu_the_same_with_less_of_its_memory(corpus: Corpus, tmp_path: Path) -> None:
    from txl.training.config import TrainConfig

    found = {}
    for offload in (False, True):
        t = trainer(tmp_path / f"{offload}", corpus)
        config = TrainConfig(
            steps=60, batch=2, tgt_len=64, precision="fp32", recompute=True, offload_memory=offload, lr=1e-3
        )  # fmt: skip
        model = t.model.config
        run = Trainer(tmp_path / f"{offload}-gpu", corpus, model, config, device="cuda")
        for _ in range(20):
            run._update()
        torch.cuda.reset_peak_memory_stats()
        found[offload] = [run._update().loss for _ in range(20)], torch.cuda.max_memory_allocated()
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert found[True][1] < found[False][1]
