"""The Python of the documentation's pages runs as printed, a page's blocks one after the other, and
their commands exist."""

import re
from pathlib import Path

import pytest
import torch

from txl.commands.cli import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python\n" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_runs_as_printed(page: Path) -> None:
    torch.manual_seed(0)
    session: dict[str, object] = {}
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"```python\n(.*?)```", text, flags=re.DOTALL):
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], str(page), "exec"), session)  # errors show the page's line


def test_commands_exist() -> None:
    for page in DOCS.rglob("*.md"):
        assert set(re.findall(r"`txl (\w+)", page.read_text(encoding="utf-8"))) <= set(COMMANDS), page
