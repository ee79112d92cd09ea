"""What goes wrong at the start of several processes is said once, by all of them, at once."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Done, in_process, one_line
from ranks import environment, run_ranks, torchrun

from txl.distributed import World
from txl.text import corpus as data
from txl.text.corpus import Corpus

CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "batch": (
        [{"batch": 3}] * 2,
        "batch must be a multiple of the number of processes times batch_chunk, 2 x 1, got 3",
    ),
    "chunks": ([{"batch": 4, "batch_chunk": 4}] * 2, "2 x 4, got 4"),
    "corpus": ([{}, {"corpus": 1}], "the processes differ in the corpus: rank 0 has"),
    "vocabulary": ([{}, {"model": {"vocab_size": 99}}], "rank 1: vocab_size is 99"),
    "model": (
        [{}, {"model": {"n_layer": 3}}],
        "the processes differ in the model's n_layer: rank 0 has 2, rank 1 has 3",
    ),
    "training": ([{}, {"lr": 0.5}], "the processes differ in training's lr: rank 0 has 0.003, rank 1 has 0.5"),
    "code": ([{}, {"other_code": True}], "the processes differ in the code of txl"),
    "no run": ([{"resume": True}] * 2, "no such checkpoint"),
}


Txl = Callable[..., Done]


@pytest.fixture
def txl(capfd: pytest.CaptureFixture[str]) -> Txl:
    return lambda *arguments: in_process(capfd, *arguments)


@pytest.fixture(scope="module")
def refused(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "text.txt").write_text(Path(corpus.folder, "train.bin").read_bytes()[::-1].hex())
    other = data.prepare(folder / "text.txt", folder / "other", vocabulary=None)
    given = {
        "folder": folder / "runs",
        "corpora": [corpus.folder, other.folder],
        "cases": {k: v[0] for k, v in CASES.items()},
    }
    found: list[dict[str, str]] = run_ranks("rank_faults:start_each", 2, given, folder / "ranks")
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse_what_does_not_go_together(name: str, refused: list[dict[str, str]]) -> None:
    for rank in refused:
        assert CASES[name][1] in rank[name]


def test_worlds(tmp_path: Path) -> None:
    found = run_ranks("rank_faults:agree", 2, {}, tmp_path)
    for rank, told in enumerate(found):
        assert told["rows"] == [World(rank, 2).rows(n) for n in (0, 1, 5, 8)]
        assert told["gathered"] == [0, 10]
        assert told["first"]
        assert told["rank 0"] == "SharedError: no such disk"
        assert told["rank 1"] == "SharedError: rank 1: no such disk"
        assert told["early"] == "rank 1: too early"
    assert [World(rank, 3).rows(8) for rank in range(3)] == [slice(0, 2), slice(2, 5), slice(5, 8)]


def test_an_error_comes_out_once(tmp_path: Path, corpus: Corpus) -> None:
    """Under torchrun, of a mistake that every process makes."""
    done = torchrun(
        2, "train", "-r", tmp_path / "run", "--data", corpus.folder, *SMALL, "--batch", 3, "--device", "cpu"
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "batch must be a multiple of the number of processes" in lines[0]
    assert done.stdout == ""


def test_the_first_rank_prepares_the_text_and_all_load_it(tmp_path: Path, text: Path) -> None:
    """More than two: those after the first would prepare at the same time."""
    done = torchrun(3, "train", "-r", tmp_path / "run", "--data", text, *SMALL, "--batch", 3, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    data.load(tmp_path / "run" / "corpus").verify()


@pytest.mark.slow
def test_another_checkpoint_is_not_resumed(tmp_path: Path, corpus: Corpus) -> None:
    run = tmp_path / "run"
    begin = ["train", "-r", run, "--data", corpus.folder, "--device", "cpu", *SMALL]
    assert torchrun(2, *begin).returncode == 0
    done = torchrun(2, "train", "-r", run, "--resume", "--device", "cpu", "--steps", 4, "--n-layer", 2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "n_layer is 2, was 1" in lines[0]


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "txl", "train", "-r", "nowhere", "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment() | own)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert f"cannot meet at 127.0.0.1:{port}" in done.stderr
    assert "EADDRINUSE" in done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "start the processes by torchrun"),
        ({"RANK": "two", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "the environment's RANK must be a whole number"),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "RANK must be from 0 to WORLD_SIZE - 1 = 1, got 5",
        ),
    ],
    ids=["half", "letters", "beyond"],
)  # fmt: skip
def test_an_environment_that_is_not_torchruns(
    txl: Txl, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one_line(txl("train", "--run", tmp_path / "r", "--device", "cpu"), words)
