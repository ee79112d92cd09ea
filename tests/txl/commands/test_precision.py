"""The dtype in which a run computes: as asked, or the one that the processor is fast in."""

from pathlib import Path

import pytest
import torch
from command_helpers import SMALL, Run, one_line
from training_helpers import trainer

from txl.text.corpus import Corpus
from txl.training import config
from txl.training.config import autocast_dtype, resolved
from txl.training.run import read_record

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("isa", "helps"),
    [("amx", True), ("avx512_bf16", True), ("neon_bf16", False), ("avx512", False), ("avx2", False), (None, False)],
)
def test_auto_is_the_faster_dtype(isa: str, helps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "instruction_set", lambda: isa)
    assert resolved("auto", CPU) == ("bf16" if helps else "fp32")
    assert autocast_dtype("auto", CPU) == (torch.bfloat16 if helps else None)
    for asked, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        assert resolved(asked, CPU) == asked
        assert autocast_dtype(asked, CPU) == dtype


def test_resumed_run_keeps_its_precision(
    txl: Run, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "instruction_set", lambda: "amx")
    auto = [x for x in SMALL if x not in ("--precision", "fp32")]
    txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *auto)
    assert read_record(tmp_path / "r").train["precision"] == "bf16"
    monkeypatch.setattr(config, "instruction_set", lambda: "avx2")
    command = ("train", "--run", tmp_path / "r", "--resume", "--steps", 4)
    assert txl(*command).returncode == 0
    assert txl(*command, "--precision", "auto").returncode == 0  # of the run
    assert read_record(tmp_path / "r").train["precision"] == "bf16"


def test_bf16_follows_fp32(tmp_path: Path, corpus: Corpus) -> None:
    """Losses of the first updates differ by bfloat16's rounding."""
    losses = {}
    for name in ("fp32", "bf16"):
        found: list[float] = []
        t = trainer(tmp_path / name, corpus, steps=30, precision=name, log_every=1)
        t.run(lambda entry, found=found: found.append(entry["loss"]) if "loss" in entry else None)  # type: ignore[misc]
        losses[name] = found
        assert all(p.dtype == torch.float32 for p in t.model.parameters())
    assert len(losses["fp32"]) == len(losses["bf16"]) > 10
    assert losses["fp32"] != losses["bf16"]
    for a, b in zip(losses["fp32"], losses["bf16"], strict=True):
        assert abs(a - b) < 0.02


def test_eval_in_bf16(txl: Run, tmp_path: Path, corpus: Corpus) -> None:
    txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL)
    found: dict[str, float] = {}
    for name in ("fp32", "bf16"):
        done = txl("eval", tmp_path / "r", "--limit", 2000, "--precision", name)
        assert ("in bfloat16" in done.stdout) == (name == "bf16")
        found[name] = float(done.stdout.split("│")[3])
    assert found["fp32"] == pytest.approx(found["bf16"], abs=0.01)
    one_line(txl("eval", tmp_path / "r", "--precision", "fp8"), "--precision must be auto, fp32, bf16, got 'fp8'")
