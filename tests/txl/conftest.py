"""The `txl` command, a small text and its corpus."""

import functools
from pathlib import Path

import pytest
from command_helpers import Run, in_process
from hypothesis import settings

from txl.commands.console import console
from txl.text import corpus as data

settings.register_profile("short", max_examples=40, deadline=None)
settings.load_profile("short")


@pytest.fixture
def txl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(console, "width", 120)
    return functools.partial(in_process, capfd)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no `loss.png`, which takes longer than a few updates."""
    monkeypatch.setattr("txl.pictures.draw_loss", lambda *_: None)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 20 kB whose lines differ in their numbers."""
    lines = [f"{n:04d} follows the line that ended in {n * 7919 % 9973:04d};\n" for n in range(480)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="session")
def corpus(text: Path, tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    return data.prepare(text, tmp_path_factory.mktemp("corpus"))
