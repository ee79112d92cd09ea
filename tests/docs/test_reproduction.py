"""The reproduction page's operations are those that are counted, its commands ones that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from txl import recipes
from txl.commands.cli import COMMANDS
from txl.recipes.cost import training_cost

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) \| ([\d.,]+) \|$", PAGE, re.M)


def operations(recipe: str, **train: int) -> float:
    found = recipes.load(recipe)
    training = dataclasses.replace(found.train_config(), **train)
    return training_cost(found.model_config(None if found.data else 204), training).total


def counted(command: str) -> float:
    script = re.search(r"examples/paper/table\d+\.sh", command)
    if script:
        rows = re.findall(r"^row \S+ (\S+) .*?\"(?: --tgt-len (\d+))? #", (ROOT / script.group()).read_text(), re.M)
        return sum(operations(recipe, **({"tgt_len": int(length)} if length else {})) for recipe, length in rows)
    if "lm1b-300m" in command:
        return sum(operations(recipe) for recipe in re.findall(r"`(lm1b-300m[\w-]*)`", command))
    if "txl recl" in command:
        return operations("wt103-qrnn") + operations("wt103-lstm")
    return operations(re.search(r"--recipe ([\w-]+)", command).group(1))  # type: ignore[union-attr]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_operations_and_hours(row: tuple[str, str, str, str]) -> None:
    total = counted(row[1])
    assert float(row[2]) * 1e18 == pytest.approx(total, rel=0.006)
    assert float(row[3].replace(",", "")) == pytest.approx(total / 3.6e17, rel=0.03, abs=0.05)


def test_every_table_and_figure_is_there() -> None:
    assert len(ROWS) == 14
    for number in range(1, 11):
        assert f"| Table {number}" in PAGE
    for figure in ("figures 3 and 4", "Figures 5, 6 and 7", "Figures 1 and 2"):
        assert figure in PAGE


def test_commands_are_those_of_txl() -> None:
    assert set(re.findall(r"`txl (\w+)", PAGE)) <= set(COMMANDS)
