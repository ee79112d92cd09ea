"""Output to a terminal or a file: help, header, picture of the loss."""

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from command_helpers import SMALL, Run, succeeded
from training_helpers import trainer

from txl import pictures
from txl.commands.cli import app
from txl.commands.train import draw_loss
from txl.text.corpus import Corpus
from txl.training.run import read_log

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_in_80_columns(txl: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    shown = succeeded(txl(command, "-h"))
    for option in COMMANDS[command].params:
        assert option.opts[0].lstrip("-").lower() in shown.stdout.lower()
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_training_into_a_file_without_matplotlib(
    txl: Run, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = txl("train", "--run", tmp_path / "r", "--data", corpus.folder, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    header, *_, finished, left_out = done.stdout.splitlines()
    assert re.fullmatch(
        r"Transformer-XL, 1 layers x 16, 0\.\d+M parameters; \w+ backend on cpu, float32; updates 0 to 3", header
    )
    assert finished == f"done: {tmp_path / 'r' / 'last.safetensors'}"
    assert left_out.startswith("loss.png was left out: matplotlib cannot be used")


@pytest.mark.parametrize("values", [{}, {"bpc": float("inf")}, {"bpc": "1", "valid_bpc": 10**400}, {"bpc": 1.0}])
def test_any_log_is_drawn(tmp_path: Path, values: dict) -> None:
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": n} | values) + "\n" for n in range(9)))
    pictures.draw_loss(read_log(tmp_path / "log.jsonl"), tmp_path / "loss.png", "bpc")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_unwritable_picture_is_reported(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "loss.png").mkdir()
    assert "loss.png" in str(draw_loss(trainer(tmp_path, corpus)))
