"""RECL's losses measured by several processes: bit for bit those of one, whoever goes on."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_commands import ended, run_commands, started_ranks
from rank_readings import measured
from ranks import run_ranks

from txl.distributed.world import World
from txl.model.config import ModelConfig
from txl.recl.losses import Losses
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

RECL = "--split train --samples 30 --step 8 --contexts 4".split()
# 4.5 million tokens: some seconds.
LONG = "--split train --samples 1000 --step 200 --contexts 20".split()


def copied(done: Losses) -> Losses:
    return Losses(done.values.copy(), done.batches, done.tokens)


@pytest.fixture(scope="module")
def begun() -> Losses:
    """Five batches, by one process."""
    return copied(measured(World(), rounds=5)[0])


@pytest.fixture(scope="module")
def found(begun: Losses, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    measurements = {
        "whole": {}, "limited": {"limit": 14}, "limit of its own": {"limit": 16}, "begun": {"begun": begun},
        "part": {"rounds": 3},
    }  # fmt: skip
    given: dict[str, Any] = {"measurements": measurements}
    ranks: list[dict[str, Any]] = run_ranks("rank_readings:readings", 2, given, tmp_path_factory.mktemp("ranks"))
    return ranks


def same(got: Losses, want: Losses) -> bool:
    return np.array_equal(got.values, want.values) and got[1:] == want[1:]


@pytest.mark.parametrize("name", ["whole", "limited", "limit of its own"])
def test_losses_are_bit_for_bit_those_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    options = {"whole": None, "limited": 14, "limit of its own": 16}
    want, batches = measured(World(), limit=options[name])
    assert np.isfinite(want.values).all()
    shares = []
    for rank in found:
        got, read = rank["measured"][name]
        assert same(got, want)
        shares.append(read)
    assert sum(shares) == batches
    assert max(shares) - min(shares) <= 1


def test_what_one_process_began_two_go_on_with(found: list[dict[str, Any]]) -> None:
    want, batches = measured(World())
    assert all(same(rank["measured"]["begun"][0], want) for rank in found)
    assert sum(rank["measured"]["begun"][1] for rank in found) == batches - 5


def test_what_two_began_one_process_goes_on_with(found: list[dict[str, Any]]) -> None:
    part, _ = found[0]["measured"]["part"]
    assert part.batches == 6
    rest, batches = measured(World(), begun=copied(part))
    want, whole = measured(World())
    assert same(rest, want)
    assert batches == whole - 6


def test_an_error_of_one_is_that_of_all(found: list[dict[str, Any]]) -> None:
    assert [rank["failing"] for rank in found] == ["rank 1: no more"] * 2


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "mem_len": 16}
    folder = tmp_path_factory.mktemp("run")
    config = ModelConfig(vocab_size=len(corpus.vocabulary), **sizes)
    Trainer(folder, corpus, config, TrainConfig(steps=3, batch=2, tgt_len=16)).run()
    return folder


def kept(folder: Path) -> Any:
    return np.load(next((folder / "losses").glob("*.npz")))


@pytest.mark.slow
def test_the_command(run: Path, tmp_path: Path) -> None:
    command = ["recl", run, *RECL, "--device", "cpu", "--out"]
    both = run_commands(*[[*command, tmp_path / "two"]] * 2)
    assert [each.returncode for each in both] == [0, 0], both
    assert "RECL in tokens" in both[0].stdout
    assert both[1].stdout == ""
    alone = run_commands([*command, tmp_path / "one"])[0]
    assert alone.returncode == 0, alone.stderr
    assert np.array_equal(kept(tmp_path / "two")["values"], kept(tmp_path / "one")["values"])
    assert (tmp_path / "two" / "recl.csv").read_text() == (tmp_path / "one" / "recl.csv").read_text()
    (tmp_path / "two" / "recl.csv").unlink()
    again = run_commands([*command, tmp_path / "two"])[0]
    assert "of them done" in again.stdout
    assert (tmp_path / "two" / "recl.csv").read_text() == (tmp_path / "one" / "recl.csv").read_text()


def test_a_folder_that_cannot_be_written_is_said_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "losses").write_text("not a folder")
    done = run_commands(*[["recl", run, *RECL, "--device", "cpu", "--out", tmp_path]] * 2)
    assert [each.returncode for each in done] == [1, 1]
    assert [len(each.stderr.splitlines()) for each in done] == [1, 0], done
    assert "cannot be written" in done[0].stderr


def test_sigterm_and_a_lost_peer_keep_what_was_measured(run: Path, tmp_path: Path) -> None:
    """SIGTERM as torchrun sends it to the first; the other one notices by itself."""
    command = ["recl", run, *LONG, "--device", "cpu", "--out", tmp_path]
    with started_ranks(command, command) as processes:
        out = processes[0].stdout
        assert out is not None
        while "tokens to read" not in out.readline():
            assert processes[0].poll() is None
        time.sleep(0.5)
        processes[0].send_signal(signal.SIGTERM)
        first, second = ended(processes)
    assert first.returncode == 130
    assert first.stderr == "interrupted\n"
    assert second.returncode == 1
    assert "another process has ended" in second.stderr
    assert kept(tmp_path)["batches"] > 0
    assert not (tmp_path / "recl.json").exists()
