"""Two processes with half of the batch each train as one process with all of it."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_functions import Trained, fully_sharded, several
from ranks import run_ranks

from txl.distributed import World
from txl.text import corpus as data
from txl.text.corpus import Corpus

UPDATES = 11
# 16 streams of 16 tokens a segment: an epoch is 9 segments, the last of them shorter.
LONG: dict[str, Any] = {"batch": 16, "tgt_len": 16, "steps": UPDATES}
NO_DROPOUT = {"dropout": 0.0, "attn_dropout": 0.0}


def case(model: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"model": NO_DROPOUT | (model or {})} | LONG | options


RECURRENT = {"dropout": 0.0}
CASES = {
    "memory": case(),
    "chunks and segments": case(batch_chunk=2, accumulate=2),
    "weight decay, ema": case(weight_decay=0.1, average="ema", ema_decay=0.9),
    "untied, pre-norm": case({"untie_r": True, "pre_norm": True, "final_norm": True}),
    # The last bin is of "z" alone, which the second rank never reads.
    "bins": case({"cutoffs": (14, 25), "div_val": 2}),
    "bins of one table, untied weights": case({"cutoffs": (14, 25), "tie_weight": False}),
    "auxiliary losses": case({"second_target": True}, intermediate_losses=True),
    "context": case(ext_len=16),
    "shaw": case({"encoding": "shaw", "table_len": 128}),
    "learned positions": case({"encoding": "learned", "table_len": 64, "mem_len": 0}),
    "lstm": {"model": {"network": "lstm"} | RECURRENT} | LONG,
    "qrnn": {"model": {"network": "qrnn"} | RECURRENT} | LONG,
    "recomputed": case(recompute=True),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus whose second half lacks a symbol."""
    lines = [f"{n:04d} follows the line that ended in {n * 7919 % 9973:04d};\n" for n in range(60)]
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(
        "".join(line.replace(";", "z") if n < 25 else line for n, line in enumerate(lines))
    )
    prepared = data.prepare(folder / "text.txt", folder / "corpus")
    assert prepared.vocabulary.to_file().endswith(b"0x7a\n")
    return prepared


@pytest.mark.slow
def test_two_ranks_train_as_one_process(corpus: Corpus, tmp_path: Path) -> None:
    """Updates in float64, over the end of an epoch: losses, gradients' norms, parameters, the
    average, and the memory of every stream."""
    given = {"corpus": corpus.folder, "cases": CASES, "updates": UPDATES}
    ranks = run_ranks(several, 2, folder=tmp_path / "runs", **given)
    alone = several(World(), tmp_path / "alone", **given)
    for name in CASES:
        assert_same(name, alone[name], [rank[name] for rank in ranks])


def assert_same(name: str, want: Trained, got: list[Trained]) -> None:
    for rank in got:
        assert rank.losses == pytest.approx(want.losses, rel=1e-9, abs=0), name
        assert rank.norms == pytest.approx(want.norms, rel=1e-7, abs=0), name
        for kind in ("parameters", "average"):
            mine, theirs = getattr(want, kind), getattr(rank, kind)
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                message = functools.partial("{}, {}: {}".format, name, key)
                torch.testing.assert_close(theirs[key], value, rtol=1e-6, atol=1e-8, msg=message)
    assert len(want.memory) == len(got[0].memory)
    for layer, *parts in zip(want.memory, *(rank.memory for rank in got), strict=True):
        torch.testing.assert_close(
            torch.cat(parts), layer, rtol=1e-6, atol=1e-8, msg=functools.partial("{}: {}".format, name)
        )
    assert want.losses[-1] < want.losses[0]


@pytest.mark.slow
def test_fully_shard_in_a_plain_loop() -> None:
    """Layers sharded by torch's FSDP2 have the losses of one process."""
    x = torch.randn(4, 12, 16, dtype=torch.float64)
    want = fully_sharded(World(), x, 5)
    for rank in run_ranks(fully_sharded, 2, x=x, updates=5):
        assert rank == pytest.approx(want, rel=1e-9, abs=0)
    assert want[-1] < want[0]
