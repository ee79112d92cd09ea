"""What a user sees who asks: versions, short options, headings, the Makefile's targets."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command_helpers import Run

import txl_kernels

ROOT = Path(__file__).parents[3]


def test_version(txl: Run) -> None:
    done = txl("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"txl {txl_kernels.__version__}, torch {torch.__version__}, Python 3.")


@pytest.mark.parametrize("command", [[], ["train"], ["generate"]])
def test_the_short_option_is_the_long_one(txl: Run, command: list[str]) -> None:
    short = txl(*command, "-h")
    assert short.returncode == 0, short.stderr
    assert short.stdout == txl(*command, "--help").stdout


def test_each_command_is_one_sentence_in_the_list(txl: Run) -> None:
    assert re.search(r"│ generate +Continue a text\. +│", txl("-h").stdout)


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("eval", ["What is scored", "How it is read"]),
        ("generate", ["Text", "Sampling"]),
        ("prepare", ["Text", "Words"]),
    ],
)
def test_options_come_in_groups(txl: Run, command: str, panels: list[str]) -> None:
    shown = txl(command, "-h").stdout
    for panel in panels:
        assert f"─ {panel} ─" in shown


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_make_lists_every_target(arguments: list[str]) -> None:
    shown = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    listed = dict(re.findall(r"^  make ([a-z-]+) +(\S.*)$", shown, re.MULTILINE))
    assert sorted(listed) == sorted(phony[1].split())
