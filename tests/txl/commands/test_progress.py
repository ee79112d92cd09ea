"""Progress: bars on a terminal, whole lines in a file."""

import io
import re
from pathlib import Path

import pytest
from command_helpers import SMALL, Run
from rich.console import Console
from training_helpers import trainer

from txl.commands import console as terminal
from txl.text.corpus import Corpus

LOGGED = {"step": 10, "loss": 1.25, "bpc": 1.8, "ppl": 3.5, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 12345.6}
VALIDATED = {"step": 10, "valid_loss": 1.5, "valid_bpc": 2.16, "valid_ppl": 4.5}


@pytest.fixture
def console(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    """The commands' console, which prints to a terminal of a kind, or to a file."""
    kind = getattr(request, "param", None)
    shown = {"force_terminal": True, "width": 90, "_environ": {"TERM": kind}, "color_system": None}
    monkeypatch.setattr(terminal, "console", Console(file=io.StringIO(), **(shown if kind else {"width": 20})))
    return terminal.console


def shown_on(console: Console, corpus: Corpus, folder: Path) -> str:
    with terminal.training_progress(trainer(folder, corpus)) as report:
        report(LOGGED)
        report(VALIDATED)
    return console.file.getvalue()


def test_a_file_has_whole_lines_however_narrow(console: Console, corpus: Corpus, tmp_path: Path) -> None:
    assert shown_on(console, corpus, tmp_path).splitlines() == [
        "step 10 of 20: loss 1.2500, bpc 1.8000, 12,346 tokens/s",
        "step 10 of 20: validation loss 1.5000, bpc 2.1600",
    ]


def test_a_file_has_a_line_every_ten_seconds_and_the_last(
    console: Console, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("txl.commands.console.time.monotonic", lambda: now)
    with terminal.training_progress(trainer(tmp_path, corpus)) as report:
        for step in range(1, 21):  # 3 seconds each
            now += 3.0
            report(LOGGED | {"step": step})
    steps = re.findall(r"^step (\d+) of 20: loss", console.file.getvalue(), re.MULTILINE)
    assert steps == ["1", "5", "9", "13", "17", "20"]


@pytest.mark.parametrize("console", ["dumb"], indirect=True)
def test_a_terminal_that_cannot_move_its_cursor_has_the_lines(console: Console, corpus: Corpus, tmp_path: Path) -> None:
    assert terminal.bar().disable
    assert "\x1b" not in shown_on(console, corpus, tmp_path)


@pytest.mark.parametrize("console", ["xterm"], indirect=True)
def test_a_terminal_has_a_bar_and_room_for_the_caret(console: Console, corpus: Corpus, tmp_path: Path) -> None:
    shown = shown_on(console, corpus, tmp_path)
    assert "12,346 tokens/s" in shown
    assert "step 10 of 20: loss" not in shown
    assert "step 10 of 20 " in shown
    assert " 50% " in shown
    assert "step 10 of 20: validation loss 1.5000, bpc 2.1600" in shown
    assert max(len(line.rstrip()) for line in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "\n", shown).splitlines()) < 88


@pytest.mark.parametrize("console", ["xterm"], indirect=True)
@pytest.mark.parametrize("width", [40, 60])
def test_a_bar_leaves_room_on_a_narrow_terminal(console: Console, corpus: Corpus, tmp_path: Path, width: int) -> None:
    console.width = width
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "\n", shown_on(console, corpus, tmp_path)).splitlines()
    assert all(len(line.rstrip()) <= width - 2 for line in shown if "validation" not in line)


def test_training_into_a_file(txl: Run, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.console, "width", 30)
    folder = tmp_path / "a folder whose name is longer than a line"
    done = txl("train", "--run", folder, "--data", corpus.folder, *SMALL, "--log-every", "2")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.endswith("; updates 0 to 3")
    speed = r"loss \d\.\d{4}, bpc \d\.\d{4}, [\d,]+ tokens/s"
    wanted = [
        rf"step 2 of 3: {speed}",
        rf"step 3 of 3: {speed}",
        r"step 3 of 3: validation loss \d\.\d{4}, bpc \d\.\d{4}",
        re.escape(f"done: {folder / 'last.safetensors'}, loss.png"),
    ]
    assert len(lines) == len(wanted)
    for pattern, line in zip(wanted, lines, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("console", ["xterm"], indirect=True)
def test_an_evaluation_on_a_terminal(console: Console) -> None:
    with terminal.evaluation_progress("attention length {8} [b]", 10) as progress:
        progress(5)
    assert "attention length {8} [b]" in console.file.getvalue()


def test_an_evaluation_into_a_file_has_no_bar(console: Console) -> None:
    with terminal.evaluation_progress("attention length 8", 10) as progress:
        progress(5)
    assert console.file.getvalue() == ""
