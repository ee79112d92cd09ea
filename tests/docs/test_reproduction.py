"""The reproduction page names every table and figure, and commands that exist."""

import re
from pathlib import Path

from txl.commands.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) \| ([\d.,]+) \|$", PAGE, re.M)


def test_every_table_and_figure_is_there() -> None:
    assert len(ROWS) == 14
    for number in range(1, 11):
        assert f"| Table {number}" in PAGE
    for figure in ("figures 3 and 4", "Figures 5, 6 and 7", "Figures 1 and 2"):
        assert figure in PAGE


def test_commands_are_those_of_txl() -> None:
    assert set(re.findall(r"`txl (\w+)", PAGE)) <= set(COMMANDS)
