"""Errors of several processes: reported once, and no process waits for one that has ended."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Run, one_line
from rank_functions import start_each
from ranks import environment, run_ranks, torchrun

from txl.text import corpus as data
from txl.text.corpus import Corpus

CASES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "batch": (
        [{"batch": 3}] * 2,
        "batch must be a multiple of the number of processes times batch_chunk, 2 x 1, got 3",
    ),
    "chunks": ([{"batch": 4, "batch_chunk": 4}] * 2, "2 x 4, got 4"),
    "corpus": ([{}, {"corpus": 1}], "the processes differ in the corpus: rank 0 has"),
    "vocabulary": ([{}, {"model": {"vocab_size": 99}}], "the processes differ in the model's vocab_size"),
    "model": (
        [{}, {"model": {"n_layer": 3}}],
        "the processes differ in the model's n_layer: rank 0 has 2, rank 1 has 3",
    ),
    "training": ([{}, {"lr": 0.5}], "the processes differ in training's lr: rank 0 has 0.003, rank 1 has 0.5"),
    "code": ([{}, {"other_code": True}], "the processes differ in the code of txl"),
    "no run": ([{"resume": True}] * 2, "no such checkpoint"),
}


@pytest.fixture(scope="module")
def refused(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "text.txt").write_text(Path(corpus.folder, "train.bin").read_bytes()[::-1].hex())
    other = data.prepare(folder / "text.txt", folder / "other", vocabulary=None)
    cases = {name: options for name, (options, _) in CASES.items()}
    return run_ranks(start_each, 2, folder=folder / "runs", corpora=[corpus.folder, other.folder], cases=cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_refuse_what_differs_or_does_not_fit(name: str, refused: list[dict[str, str]]) -> None:
    for rank in refused:
        assert CASES[name][1] in rank[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [([], "log.jsonl"), (["--lr", 1e6, "--clip", 1e30, "--warmup", 1, "--steps", 200], "at step")],
    ids=["first rank", "all ranks"],
)
def test_error_is_reported_once(tmp_path: Path, corpus: Corpus, options: list[object], words: str) -> None:
    """The first rank alone cannot replace a folder by its log, while the other goes on."""
    if words == "log.jsonl":
        (tmp_path / "run" / "log.jsonl").mkdir(parents=True)
    began = time.monotonic()
    done = torchrun(2, "train", "-r", tmp_path / "run", "--data", corpus.folder, *SMALL, *options, "--device", "cpu")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: rank ")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_first_rank_prepares_the_text(tmp_path: Path, text: Path) -> None:
    """Three ranks: the second and third must not prepare at the same time."""
    done = torchrun(3, "train", "-r", tmp_path / "run", "--data", text, *SMALL, "--batch", 3, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    data.load(tmp_path / "run" / "corpus").verify()


@pytest.mark.slow
def test_port_in_use_is_reported() -> None:
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
def test_environment_not_set_by_torchrun(
    txl: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one_line(txl("train", "--run", tmp_path / "r", "--device", "cpu"), words)
