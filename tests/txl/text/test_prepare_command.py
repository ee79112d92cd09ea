"""`txl prepare`: options and output."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from txl.commands import prepare as command
from txl.commands.cli import app
from txl.errors import TxlError
from txl.text import corpus as data
from txl.text import datasets


@pytest.fixture
def txl(monkeypatch: pytest.MonkeyPatch) -> object:
    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["prepare", *map(str, arguments)])
        if isinstance(done.exception, TxlError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    # One that writes to whatever stdout is when it is used.
    monkeypatch.setattr(command, "console", Console(width=200))
    return run


def test_published_sizes_are_compared(txl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {"train": "a b\n", "valid": "a\n", "test": "b\n"}.items():
        (tmp_path / f"wiki.{name}.tokens").write_text(content)
    monkeypatch.setitem(datasets.RULES["wikitext-103"].counts, "valid", 2)
    output = txl(tmp_path / "c", "--data", tmp_path)
    assert " train:             3 tokens (published: 103,227,021)\n" in output
    assert " valid:             2 tokens (as published)\n" in output
    assert "vocabulary: 3 words (published: 267,735); written to" in output


def test_options_reach_the_rule(txl, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The cat SAT down\n" * 100)
    txl(tmp_path / "c", "--data", tmp_path / "a.txt", "--as", "words", "--lower", "--max-words", 3)
    assert data.load(tmp_path / "c").vocabulary.words == ("<eos>", "the", "cat", "sat", "<unk>")
    (tmp_path / "v.txt").write_text("sat\n<eos>\n<unk>\n")
    txl(tmp_path / "d", "--data", tmp_path / "a.txt", "--as", "words", "--vocabulary", tmp_path / "v.txt")
    assert data.load(tmp_path / "d").vocabulary.words == ("sat", "<eos>", "<unk>")
