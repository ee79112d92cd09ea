"""The `txl` command in this process, and its output."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from txl.commands import cli

# Options of a model that trains in a moment.
SMALL = (
    "--n-layer 1 --d-model 16 --n-head 2 --d-head 8 --d-inner 32 --mem-len 16 --batch 2 --tgt-len 16 --steps 3 "
    "--precision fp32"
).split()


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


def called(*arguments: object) -> int:
    """Run the command in this process, which saves the start of an interpreter; return its exit
    code."""
    argv = sys.argv
    sys.argv = ["txl", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv
    return 0


def in_process(capfd: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """Run the command in this process, and return its output, too."""
    return Done(called(*arguments), *capfd.readouterr())


def succeeded(done: Done) -> Done:
    """Assert that the command was successful, and return it."""
    assert done.returncode == 0, done.stderr
    return done


def one_line(done: Done, words: str) -> None:
    """Assert that the command failed with one line that has these words."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
