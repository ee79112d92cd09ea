"""Damaged files and killed processes: an error that names the file, or the undamaged result."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from training_helpers import trainer, unlock

from txl.commands.train import run_to_go_on
from txl.errors import TxlError
from txl.text import corpus as data
from txl.text.datasets import PrepareOptions
from txl.text.readers import SPLITS
from txl.text.vocabulary import from_file
from txl.training import checkpoint as checkpoints
from txl.training.run import CHANGEABLE
from txl.training.trainer import Trainer

OPTIONS: dict[str, Any] = {"steps": 6, "eval_every": 3, "save_every": 2}
ODD = (None, True, -1, 0, 10**30, 1e999, "", "x", [], {}, [[]], float("nan"))
RUN = ("last.safetensors", "run.json", "log.jsonl", "corpus/corpus.json", "corpus/vocabulary.txt", "corpus/train.bin")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates with a corpus of its own."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer(folder, data.prepare(text, folder / "corpus"), **OPTIONS).run()
    unlock(folder)
    return folder


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw damaged bytes: flipped, cut off, added, zeroed or exchanged, or a forged JSON value."""
    at = draw(st.integers(0, len(content) - 1))
    kind = draw(st.sampled_from(("flip", "flip", "cut", "append", "zero", "swap", "json")))
    if kind == "flip":
        other = bytearray(content)
        for n in {at, draw(st.integers(0, len(content) - 1))}:
            other[n] ^= 1 << draw(st.integers(0, 7))
        return bytes(other)
    if kind == "json":
        return draw(forged(content))
    end = at + draw(st.integers(1, 64))
    return {
        "cut": content[:at], "append": content + content[at:end], "swap": content[at:] + content[:at],
        "zero": content[:at] + bytes(len(content[at:end])) + content[end:],
    }[kind]  # fmt: skip


@st.composite
def forged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw JSON with a value removed or replaced, except options that may change."""
    inside = value = None
    with suppress(ValueError):
        inside = value = json.loads(content)
    while isinstance(inside, dict) and inside:
        key = draw(st.sampled_from(sorted(inside)))
        assume(key not in CHANGEABLE)
        if not isinstance(inside[key], dict) or draw(st.booleans()):
            inside[key] = draw(st.sampled_from(ODD))
            if draw(st.booleans()):
                del inside[key]
            break
        inside = inside[key]
    return json.dumps(value).encode()


def for_any_damage(file: Path, examples: int, check: Any) -> None:
    """Call `check` with the file damaged; its error must name the file or its folder."""
    content = file.read_bytes()

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(other=damaged(content))
    def damaging(other: bytes) -> None:
        file.write_bytes(other)
        message = str(file)
        try:
            check()
        except TxlError as error:
            message = str(error)
        assert str(file if file.suffix == ".safetensors" else file.parent) in message
        assert len(message.splitlines()) == 1

    damaging()


def test_checkpoints(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    path.write_bytes((whole / "last.safetensors").read_bytes())
    want = checkpoints.load(path)

    def check() -> None:
        found = checkpoints.load(path)
        assert (found.config, found.vocabulary, found.state) == (want.config, want.vocabulary, want.state)
        assert found.tensors.keys() == want.tensors.keys()
        assert all(torch.equal(x, found.tensors[name]) for name, x in want.tensors.items())

    for_any_damage(path, 200, check)


@pytest.mark.parametrize("name", ["corpus.json", "vocabulary.txt", "train.bin", "valid.bin", "test.bin"])
def test_corpora(whole: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(whole / "corpus", tmp_path / "c")
    want = data.load(whole / "corpus")

    def check() -> None:
        found = data.load(tmp_path / "c")
        assert [len(found.split(name)) for name in SPLITS] == [len(want.split(name)) for name in SPLITS]
        found.verify()
        assert (found.fingerprint, found.vocabulary) == (want.fingerprint, want.vocabulary)
        assert (found.rule, found.source) == (want.rule, want.source)
        assert all(np.array_equal(found.split(name), want.split(name)) for name in SPLITS)

    for_any_damage(tmp_path / "c" / name, 80, check)


@pytest.mark.parametrize("rule", ["bytes", "words"])
def test_vocabularies(text: Path, tmp_path: Path, rule: str) -> None:
    """Without a checksum a vocabulary can become another valid one."""
    vocabulary = data.prepare(text, tmp_path / "c", PrepareOptions(rule)).vocabulary

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(content=damaged(vocabulary.to_file()))
    def check(content: bytes) -> None:
        with suppress(TxlError):
            found = from_file(content, vocabulary.settings())
            assert from_file(found.to_file(), found.settings()) == found
            assert 0 <= found.start < len(found)

    check()


def resume(folder: Path) -> None:
    corpus, model, config, _ = run_to_go_on(folder, None, {"steps": 8})
    try:
        Trainer(folder, corpus, model, config, resume=True).run()
    finally:
        unlock(folder)


@pytest.mark.parametrize("name", RUN)
def test_resumed_runs(whole: Path, tmp_path: Path, name: str) -> None:
    """The run is resumed to the same parameters, or its checkpoint is unchanged."""
    want, run = shutil.copytree(whole, tmp_path / "want"), tmp_path / "run"
    resume(want)
    tensors = checkpoints.load(want / "last.safetensors").tensors
    shutil.copytree(whole, run)

    def check() -> None:
        before = (run / "last.safetensors").read_bytes()
        try:
            resume(run)
        except TxlError:
            assert (run / "last.safetensors").read_bytes() == before
            raise
        found = checkpoints.load(run / "last.safetensors").tensors
        assert found.keys() == tensors.keys()
        assert [n for n, x in tensors.items() if not torch.equal(x, found[n])] == []
        shutil.rmtree(run)
        shutil.copytree(whole, run)

    for_any_damage(run / name, 20, check)
