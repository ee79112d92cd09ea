"""The README's Python runs as printed, and its commands exist."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["rel_attention", "layer"])
def test_runs_as_printed(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_the_speed_up_of_evaluation_is_that_of_the_page_on_speed() -> None:
    """On the first screens of README and docs, beside the paper's number."""
    docs = Path(__file__).parents[2] / "docs"
    speed = (docs / "speed.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+x) \| ([\d,]+x) \| (1,874x) \|", README, flags=re.MULTILINE)
    assert len(rows) == 2  # a CPU and a GPU
    front = README[: README.index("<!-- figures")], (docs / "index.md").read_text(encoding="utf-8")
    for device, *found in rows:
        section = speed[speed.index(f"**{device}**") :]
        row = re.search(r"^\| 3,800 \|.*$", section, flags=re.MULTILINE)
        assert row is not None
        assert all(x in row[0] for x in found)
        assert all(found[1].rstrip("x") in text and "1,874" in text for text in front)
