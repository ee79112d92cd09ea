"""The Python of README.md and the documentation's pages runs as printed, the blocks of a page one
after the other; commands exist, and figures that stand twice agree."""

import re
from pathlib import Path

import pytest
import torch

from txl.commands.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [x for x in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "```python\n" in x.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
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
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE))


def test_speed_up_of_evaluation_agrees_on_all_pages() -> None:
    """On the first screens of README and docs, beside the paper's, and on the page on speed."""
    speed = (DOCS / "speed.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+x) \| ([\d,]+x) \| (1,874x) \|", README, flags=re.MULTILINE)
    assert len(rows) == 2  # a CPU and a GPU
    front = README[: README.index("<!-- figures")], (DOCS / "index.md").read_text(encoding="utf-8")
    for device, *found in rows:
        section = speed[speed.index(f"**{device}**") :]
        row = re.search(r"^\| 3,800 \|.*$", section, flags=re.MULTILINE)
        assert row is not None
        assert all(x in row[0] for x in found)
        assert all(found[1].rstrip("x") in text and "1,874" in text for text in front)
