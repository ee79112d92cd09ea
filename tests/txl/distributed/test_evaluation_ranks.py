"""Evaluation by several processes: the same score in all of them, and errors said once."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_commands import run_commands
from rank_readings import scores
from ranks import environment, run_ranks, torchrun

from txl.distributed import World
from txl.evaluation.score import Score
from txl.language_model import load
from txl.model.config import ModelConfig
from txl.report import evaluations
from txl.text.corpus import Corpus
from txl.training.config import TrainConfig
from txl.training.trainer import Trainer

CASES: dict[str, dict[str, Any]] = {
    "cached": {"segment": 5, "batch": 4},
    "cached, streams that do not divide": {"segment": 16, "batch": 7},
    "cached, fewer streams than ranks": {"batch": 1},
    "cached, two streams": {"batch": 2},
    "cached, zeros before": {"model": "zeros", "batch": 3},
    "cached, released": {"counting": "released", "batch": 5},
    "cached, limited": {"limit": 20, "batch": 3},
    "segments": {"method": "segments", "segment": 4, "batch": 3},
    "segments, forgetting": {"method": "segments", "segment": 4, "batch": 3, "carry_memory": False},
    "segments, released": {"method": "segments", "segment": 4, "batch": 4, "counting": "released"},
    "sliding": {"method": "sliding", "segment": 3, "batch": 4},
    "sliding, each token": {"method": "sliding", "segment": 1, "attn_len": 6},
    "sliding, one whole window": {"method": "sliding", "segment": 12, "limit": 12},
    "sliding, less than a window": {"method": "sliding", "segment": 8, "limit": 5},
    "lstm": {"model": "lstm", "method": "segments", "segment": 16, "batch": 3},
    "lstm, one stream": {"model": "lstm", "method": "segments", "segment": 16, "batch": 1},
    "lstm, sliding": {"model": "lstm", "method": "sliding", "segment": 4, "batch": 3},
}  # fmt: skip
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"limit": 0}, "the split to evaluate is empty"),
    "sliding, released": ({"method": "sliding", "counting": "released"}, "goes with counting 'all' only"),
    "rank 1 fails": ({"batch": 4, "fails_on": 1}, "rank 1: no more"),
    "rank 1 fails, sliding": ({"method": "sliding", "segment": 4, "fails_on": 1}, "rank 1: no more"),
    "rank 0 fails": ({"batch": 4, "fails_on": 0}, "no more"),
}


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Score | str]]:
    """Each rank's; three share two streams and one."""
    cases = CASES | {name: options for name, (options, _) in ERRORS.items()}
    given: dict[str, Any] = {"cases": cases}
    folder = tmp_path_factory.mktemp("ranks")
    ranks: list[dict[str, Score | str]] = run_ranks("rank_readings:scores", request.param, given, folder)
    return ranks


def test_the_score_is_that_of_one_process(found: list[dict[str, Score | str]]) -> None:
    alone = scores(World(), CASES)
    for name in CASES:
        want = alone[name]
        assert isinstance(want, Score)
        for rank in found:
            got = rank[name]
            assert isinstance(got, Score), (name, got)
            assert (got.attn_len, got.tokens) == (want.attn_len, want.tokens), name
            assert math.isclose(got.nats, want.nats, rel_tol=1e-12), name
        assert len({rank[name].nats for rank in found}) == 1, name  # type: ignore[union-attr]


def test_an_error_of_one_is_that_of_all(found: list[dict[str, Score | str]]) -> None:
    for name, (_, words) in ERRORS.items():
        for rank in found:
            assert words in str(rank[name]), name


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "mem_len": 16}
    folder = tmp_path_factory.mktemp("run")
    config = ModelConfig(vocab_size=len(corpus.vocabulary), **sizes)
    Trainer(folder, corpus, config, TrainConfig(steps=3, batch=2, tgt_len=16)).run()
    return folder


def test_the_command_speaks_and_keeps_once(run: Path, corpus: Corpus, tmp_path: Path) -> None:
    folder, model = Path(shutil.copytree(run, tmp_path / "run")), load(run)
    done = torchrun(2, "eval", folder, *"--attn-len 16,32 --limit 300 --batch 3".split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attention length") == 1
    kept = [each.score for each in evaluations(folder)]
    assert [score.attn_len for score in kept] == [16, 32]
    for score in kept:
        want = model.evaluate(corpus.test, score.attn_len, limit=300, batch=3)
        assert score.tokens == want.tokens == 300
        assert math.isclose(score.nats, want.nats, rel_tol=1e-6)


def test_the_command_starts_its_own_processes(run: Path) -> None:
    command = [sys.executable, "-m", "txl", "eval", run, "--limit", "200", "--devices", "2", "--device", "cpu"]
    done = subprocess.run(list(map(os.fspath, command)), capture_output=True, text=True, env=environment(), timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attention length") == 1


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (("{run}", "--split", "nope"), "split must be one of train, valid, test, got 'nope'"),
        (("{nowhere}",), "rank 1: {nowhere}: no such checkpoint"),
        (("{other}",), "the processes differ in the checkpoint: rank 0 has"),
    ],
    ids=["split", "no checkpoint", "another checkpoint"],
)  # fmt: skip
def test_a_mistake_is_said_once_and_nobody_waits(run: Path, tmp_path: Path, own: tuple[str, ...], words: str) -> None:
    """The last two of rank 1 alone."""
    names = {"run": run, "nowhere": tmp_path / "nowhere", "other": run / "last.safetensors"}
    command = ["eval", *(part.format(**names) for part in own), "--data", run / "text.txt"]
    (run / "text.txt").write_text("0001 follows the line\n" * 20)
    shared = words.startswith("split")
    done = run_commands(command if shared else ["eval", run, "--data", run / "text.txt"], command)
    assert [each.returncode for each in done] == [1, 1], done
    errors = [line for each in done for line in each.stderr.splitlines() if line]
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: ")
    assert words.format(**names) in errors[0]
    assert [each.stdout for each in done] == ["", ""]
