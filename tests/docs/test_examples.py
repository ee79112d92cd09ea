"""The examples run on small sizes; they compare their results themselves."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_helpers import in_process
from training_helpers import trainer

from txl import recipes
from txl.text import corpus as data

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--n-layer 1 --d-model 16 --n-head 1 --d-head 16 --d-inner 16 --batch 2 --cutoffs 20,60".split()


def numbered_lines(folder: Path) -> Path:
    (folder / "text.txt").write_text("".join(f"{n:04d} follows the line before;\n" for n in range(300)))
    return folder / "text.txt"


def run_example(name: str, *args: Any, **sizes: Any) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*args, **sizes)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("drop_in", {"length": 40, "memory": 24, "rounds": 1}),
        ("conformer", {"frames": 60}),
        ("gtrxl", {"environments": 4, "memory_len": 9, "length": 6}),
        ("streaming", {"segments": 24, "length": 4, "window": 32}),
    ],
)
def test_layers(name: str, sizes: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    run_example(name, **sizes)
    printed = capsys.readouterr().out
    if name == "drop_in":
        assert float(printed.splitlines()[0].removeprefix("largest difference: ")) < 1e-5


@pytest.mark.slow
def test_several_devices() -> None:
    """In one process; trainings of several are in tests/txl/distributed."""
    assert run_example("several_devices", steps=3) < 6


def test_training_loop(tmp_path: Path) -> None:
    """Lines that differ in their numbers are learned in 60 steps: 25 symbols need 4.6 bits."""
    assert run_example("train", str(numbered_lines(tmp_path)), steps=60, batch=4, length=32) < 2


WITHOUT_TRANSFORMERS = """
import runpy, sys

sys.modules["transformers"] = None
for name in sys.argv[1:]:
    try:
        runpy.run_path(name)
    except SystemExit as error:
        print(error)
"""


@pytest.mark.slow
def test_missing_packages_are_named_with_their_installation() -> None:
    names = ["hugging_face", "speech_encoder", "hour_of_audio", "inkling"]
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, *(EXAMPLES / f"{name}.py" for name in names)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(names), lines
    assert all("pip install " in line for line in lines), lines


def test_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = data.prepare(numbered_lines(tmp_path), tmp_path / "corpus")
    trainer(tmp_path / "run", corpus, steps=3).run()
    run_example("evaluate", tmp_path / "run", prompt="0001 ", text="0001 follows the line")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["8", "32", "40"]
    assert "\n".join(lines[4:]).startswith("0001 ")


def test_effective_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = data.prepare(numbered_lines(tmp_path), tmp_path / "corpus")
    trainer(tmp_path / "run", corpus, steps=3).run()
    found = run_example("effective_context", tmp_path / "run", samples=20, step=8, contexts=4, order=3)
    assert found["3-gram"].length == 8  # it sees no more
    assert max(found["3-gram"].gains) < 1e-12
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["run", "3-gram"]


def recorded(tmp_path: Path, script: str, *arguments: object, **variables: str) -> list[list[str]]:
    """Return the arguments of each call of txl in a script, recorded by a command of that name."""
    stub = tmp_path / "bin" / "txl"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    stub.chmod(0o755)
    (tmp_path / "calls").write_text("")
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"} | variables
    subprocess.run(["bash", EXAMPLES / script, *arguments], env=environment, check=True, capture_output=True)  # type: ignore[list-item]
    return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def words(tmp_path: Path) -> data.Corpus:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n % 97} says {n * 7 % 89} and no more\n" for n in range(400)))
    return data.prepare(text, tmp_path / "corpus", data.PrepareOptions("words"))


@pytest.mark.parametrize(("table", "rows"), [("table6", 10), ("table10", 4)])
def test_paper_tables(tmp_path: Path, capfd: pytest.CaptureFixture[str], table: str, rows: int) -> None:
    """Each row is scored at training's attention length among others; the last row runs."""
    corpus, runs, script = words(tmp_path), tmp_path / "runs", f"paper/{table}.sh"
    extra = ["--steps", "2", "--device", "cpu", *TINY]
    calls = recorded(tmp_path, script, corpus.folder, runs, *extra, EVAL="--limit 20")
    assert [call[0] for call in calls] == ["train", "eval"] * rows
    for train, scored in zip(calls[::2], calls[1::2], strict=True):
        recipe = recipes.load(train[train.index("--recipe") + 1])
        training = recipe.train_config()
        segment = int(train[train.index("--tgt-len") + 1]) if "--tgt-len" in train else training.tgt_len
        lengths = scored[scored.index("--attn-len") + 1].split(",")
        assert str(recipe.model_config().attn_len(segment)) in lengths
        assert str(recipe.evaluate["attn_len"]) in lengths or "--tgt-len" in train
        for option in ("method", "segment", "clamp_len"):
            given = scored[scored.index("--" + option.replace("_", "-")) + 1] if option in recipe.evaluate else None
            assert given == (str(recipe.evaluate[option]) if given else None)
    for call in calls[-2:]:
        done = in_process(capfd, *call)
        assert done.returncode == 0, (call, done.stderr)
    assert "shortest length within 0.1%" in done.stdout
    again = recorded(tmp_path, script, corpus.folder, runs)
    assert again[-2] == ["train", "--run", str(runs / calls[-1][1].rsplit("/", 1)[1]), "--resume"]
